package objectguard

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// HTTP is a Store that speaks plain HTTP: GET with an ETag in the answer, PUT with If-Match or If-None-Match. This is
// the language of S3 and its likes, of Azure Blob Storage with the header x-ms-blob-type, and of Google Cloud Storage's
// XML API for objects that are not transcoded. It is safe for concurrent use.
//
// Test whether the store heeds the conditions: a store that ignores If-Match admits every client. See Probe.
type HTTP struct {
	// URL is that of the bucket; keys are appended after a slash.
	URL string
	// Client signs the requests, usually in its Transport. Nil: http.DefaultClient. It must not repeat a PUT.
	Client *http.Client
	// Header is sent with each request.
	Header http.Header
	// MaxBytes bounds the bytes that Get reads. Default 16 MiB.
	MaxBytes int64
}

var _ Store = (*HTTP)(nil)

const defaultMaxBytes = 16 << 20

// Get implements Store.
func (s *HTTP) Get(ctx context.Context, key string) ([]byte, string, error) {
	resp, err := s.do(ctx, http.MethodGet, key, nil, "", "")
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	most := s.MaxBytes
	if most <= 0 {
		most = defaultMaxBytes
	}
	content, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	switch {
	case err != nil:
		return nil, "", err
	case resp.StatusCode == http.StatusNotFound:
		return nil, "", fmt.Errorf("%w: %s", ErrNotExist, key)
	case resp.StatusCode != http.StatusOK:
		return nil, "", unexpected(http.MethodGet, key, resp, content)
	case int64(len(content)) > most:
		return nil, "", fmt.Errorf("GET %s: the object has more than %d bytes", key, most)
	}
	tag := resp.Header.Get("ETag")
	if strings.HasPrefix(tag, "W/") {
		return nil, "", fmt.Errorf("GET %s: the ETag %s is weak, and If-Match needs a strong one", key, tag)
	}
	return content, tag, nil
}

// Put implements Store.
func (s *HTTP) Put(ctx context.Context, key string, content []byte, tag string) error {
	condition, value := "If-Match", tag
	if tag == "" {
		condition, value = "If-None-Match", "*"
	}
	resp, err := s.do(ctx, http.MethodPut, key, content, condition, value)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	switch code := resp.StatusCode; {
	case code == http.StatusOK || code == http.StatusCreated || code == http.StatusNoContent:
		return nil // even if the rest of the answer is lost
	case code == http.StatusPreconditionFailed, // the rule
		code == http.StatusConflict,              // S3: two conditional writes meet; Azure: the object is there
		code == http.StatusNotFound && tag != "": // S3: the object is gone
		return fmt.Errorf("%w: %w", ErrChanged, unexpected(http.MethodPut, key, resp, text))
	case err != nil:
		return err
	}
	return unexpected(http.MethodPut, key, resp, text)
}

func (s *HTTP) do(ctx context.Context, method, key string, content []byte, condition,
	value string) (*http.Response, error) {
	segments := strings.Split(key, "/")
	for i, each := range segments {
		segments[i] = url.PathEscape(each)
	}
	target := strings.TrimSuffix(s.URL, "/") + "/" + strings.Join(segments, "/")
	var body io.Reader
	if method == http.MethodPut {
		body = bytes.NewReader(content)
	}
	r, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, err
	}
	for name, values := range s.Header {
		r.Header[http.CanonicalHeaderKey(name)] = append([]string(nil), values...)
	}
	if condition != "" {
		r.Header.Set(condition, value)
	} else {
		r.Header.Set("Cache-Control", "no-cache")
	}
	client := s.Client
	if client == nil {
		client = http.DefaultClient
	}
	return client.Do(r)
}

func unexpected(method, key string, resp *http.Response, text []byte) error {
	const most = 200
	return fmt.Errorf("%s %s: %s: %.*s", method, key, resp.Status, most, text)
}
