package builtin_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// atRevision changes a backup so that a server that is restored from it has the revision.
func atRevision(t *testing.T, backup []byte, revision uint64) []byte {
	t.Helper()
	const ahead = 1 << 32 // by which a restore sets the revision ahead, and more by the age of the backup
	const format, machine = "fencelock backup 1\n", "fencelock\x00"
	line, state, found := bytes.Cut(bytes.TrimPrefix(backup, []byte(format)), []byte("\n"))
	if !found || !bytes.HasPrefix(state, []byte(machine)) {
		t.Fatal("backups have another format")
	}
	var info map[string]any
	if err := json.Unmarshal(line, &info); err != nil {
		t.Fatal(err)
	}
	info["at"] = time.Now().Add(time.Hour)
	line, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	state = state[:len(state)-2*sha256.Size]
	version := state[len(machine)]
	_, n := binary.Uvarint(state[len(machine)+1:])
	state = append(binary.AppendUvarint(append([]byte(machine), version), revision-ahead), state[len(machine)+1+n:]...)
	sealed := func(data []byte) []byte { sum := sha256.Sum256(data); return append(data, sum[:]...) }
	return sealed(append(append([]byte(format), append(line, '\n')...), sealed(state)...))
}

// TestRevisionNearItsEnd restores a server a little below the greatest revision. Tokens rise up to that, which guards still
// admit; then nothing is granted, also after a restart, and holds can be renewed and released.
func TestRevisionNearItsEnd(t *testing.T) {
	t.Parallel()
	n := startNode(t)
	giveBack(t, opened(t, n), take(t, opened(t, n), request("first", time.Minute)))
	var backup bytes.Buffer
	if err := n.current().Backup(t.Context(), &backup); err != nil {
		t.Fatal(err)
	}
	n.stop(t)
	n.config.DataDir = t.TempDir()
	const few = 60
	changed := atRevision(t, backup.Bytes(), uint64(fencing.MaxToken)-few)
	about, err := replica.Restore(n.config.DataDir, bytes.NewReader(changed), replica.RestoreOptions{ClosedFor: -1})
	if err != nil {
		t.Fatal(err)
	}
	if about.Revision != uint64(fencing.MaxToken)-few {
		t.Fatalf("restored at revision %d", about.Revision)
	}
	n.start(t)
	d := opened(t, n)
	r := request("held", time.Minute)
	r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
	held := take(t, d, r)
	last := held.Token
	grants := func(d *builtin.Driver) error {
		for range 2 * few {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			g, err := d.Acquire(ctx, request("x", time.Minute))
			cancel()
			if err != nil {
				return err
			}
			if g.Token <= last || g.Token > fencing.MaxToken {
				t.Errorf("token %v after %v, and %v at most", g.Token, last, fencing.MaxToken)
			}
			last = g.Token
			giveBack(t, d, g)
		}
		return nil
	}
	refused := func(what string, err error) {
		t.Helper()
		var limit *builtin.LimitError
		if !errors.As(err, &limit) || limit.Limit != "Revision" || errors.Is(err, backend.ErrUnknown) {
			t.Errorf("%s: %v, want a LimitError of the revision", what, err)
		}
	}
	refused("at the end", grants(d))
	n.stop(t)
	n.start(t)
	refused("after a restart", grants(d))
	refused("a new client", grants(opened(t, n)))
	if err := d.Renew(t.Context(), []backend.Grant{held})[0].Err; err != nil {
		t.Errorf("the hold of before: %v", err)
	}
	giveBack(t, d, held)
	refused("once it is free", grants(d))
}

// TestTTLsChangeUnderAHold restarts a server with bounds of the TTL that a living hold exceeds. The hold goes on, new clients
// are refused that TTL, and when the holder is cut off a rival is granted the name after its time is over.
func TestTTLsChangeUnderAHold(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	for name, c := range map[string]struct{ least, most, rival time.Duration }{
		"the maximum is lowered": {100 * time.Millisecond, time.Second, time.Second},
		"the minimum is raised":  {2 * ttl, time.Hour, 2 * ttl},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := startNode(t)
			d, link := linked(t, n.addr())
			t.Cleanup(func() { _ = d.Close(context.Background()) })
			held := take(t, d, request("x", ttl))
			n.stop(t)
			n.config.MinTTL, n.config.MaxTTL = c.least, c.most
			n.start(t)
			since := backend.SystemClock().Now()
			eventually(t, "the hold is renewed", func() bool {
				answer := d.Renew(t.Context(), []backend.Grant{held})[0]
				if errors.Is(answer.Err, backend.ErrNotHeld) {
					t.Fatalf("Renew = %v", answer.Err)
				}
				held.SentAt = max(held.SentAt, answer.SentAt)
				return answer.Err == nil && answer.SentAt > since
			})
			if _, err := opened(t, n).Acquire(t.Context(), request("y", ttl)); !errors.Is(err, backend.ErrInvalidTTL) {
				t.Errorf("a new client: %v, want ErrInvalidTTL", err)
			}
			link.Refuse()
			rival := request("x", c.rival)
			rival.Wait = true
			g := take(t, opened(t, n), rival)
			if early := held.SentAt.Add(d.Describe().Validity(ttl)).Sub(backend.SystemClock().Now()); early > 0 {
				t.Errorf("a rival is granted the name %v before the holder's time is over", early)
			}
			if g.Token <= held.Token {
				t.Errorf("token %v after %v", g.Token, held.Token)
			}
		})
	}
}
