package objectguard_test

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/objectguard"
	"github.com/fencelock/fencelock/internal/testtier"
)

// s3 is the variable that names a bucket of a real server: http://key:secret@host:port/bucket.
const s3 = "FENCELOCK_S3"

// A real server, which is probed first.
func TestS3(t *testing.T) {
	address := os.Getenv(s3)
	if address == "" {
		t.Skip(testtier.Mark + s3 + " names no bucket; see CONTRIBUTING.md")
	}
	address += "/" + rand.Text() // the terms of one run are not those of another
	store, client, err := bucketAt(address)
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	if err := objectguard.Probe(t.Context(), store, "probe"); err != nil {
		t.Fatal(err)
	}
	guard, err := objectguard.New(store, &objectguard.Options{Prefix: "guarded/"})
	if err != nil {
		t.Fatal(err)
	}
	create(t, guard)
	guardtest.Run(t, guardtest.Harness{
		Name: "object", Open: open, Address: address, Space: space, Clients: 4, Checks: 500, Apart: true, Ordered: true,
		Blind:   true,
		Restart: func(testing.TB) {}, // whoever runs it knows whether it keeps what it has acknowledged
	})
}

// bucketAt returns the store at a URL, with requests that are signed if there is a user in it.
func bucketAt(address string) (objectguard.Store, *http.Client, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, nil, err
	}
	client := &http.Client{Transport: &http.Transport{}}
	if u.User == nil {
		return &objectguard.HTTP{URL: address, Client: client}, client, nil
	}
	secret, _ := u.User.Password()
	client.Transport = &signer{client.Transport.(*http.Transport), u.User.Username(), secret}
	u.User = nil
	return flat{&objectguard.HTTP{URL: u.String(), Client: client}}, client, nil
}

// flat is a Store without folders: a gateway to a file system has no object a/b beside an object a.
type flat struct{ objectguard.Store }

func (s flat) Get(ctx context.Context, key string) ([]byte, string, error) {
	return s.Store.Get(ctx, s.key(key))
}

func (s flat) Put(ctx context.Context, key string, content []byte, tag string) error {
	return s.Store.Put(ctx, s.key(key), content, tag)
}

func (flat) key(key string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(key))) }

// signer signs requests as S3 wants them (Signature Version 4).
type signer struct {
	*http.Transport
	key, secret string
}

func (s *signer) RoundTrip(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	r = r.Clone(r.Context())
	r.Body = io.NopCloser(bytes.NewReader(body))
	sum := sha256.Sum256(body)
	now := time.Now().UTC()
	day, hash := now.Format("20060102"), hex.EncodeToString(sum[:])
	r.Header.Set("X-Amz-Date", now.Format("20060102T150405Z"))
	r.Header.Set("X-Amz-Content-Sha256", hash)
	var path strings.Builder
	for _, c := range []byte(r.URL.Path) {
		if strings.IndexByte("/-._~", c) >= 0 || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' {
			path.WriteByte(c)
		} else {
			fmt.Fprintf(&path, "%%%02X", c)
		}
	}
	const signed = "host;x-amz-content-sha256;x-amz-date"
	canonical := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n\nhost:%s\nx-amz-content-sha256:%s\nx-amz-date:%s\n\n%s\n%s",
		r.Method, &path, r.URL.Host, hash, r.Header.Get("X-Amz-Date"), signed, hash))
	scope := day + "/us-east-1/s3/aws4_request"
	mac := []byte("AWS4" + s.secret)
	for _, text := range []string{
		day, "us-east-1", "s3", "aws4_request",
		"AWS4-HMAC-SHA256\n" + r.Header.Get("X-Amz-Date") + "\n" + scope + "\n" + hex.EncodeToString(canonical[:]),
	} {
		h := hmac.New(sha256.New, mac)
		io.WriteString(h, text)
		mac = h.Sum(nil)
	}
	r.Header.Set("Authorization",
		fmt.Sprintf("AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%x", s.key, scope, signed, mac))
	return s.Transport.RoundTrip(r)
}
