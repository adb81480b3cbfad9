package gateway

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/fencelock/fencelock/internal/audit"
)

// The audit log has denials, invalid credentials and forced releases. It has each acquire and each release once.
func TestAudit(t *testing.T) {
	t.Parallel()
	withRules(t, "allow token:ci acquire a\nallow token:ops force \"\"\n", []string{"ci", "ops"}, func(t *testing.T, d *ruled) {
		acquire := `{"ownerId":"o","ttlMillis":60000,"requestId":"one"}`
		lock := d.granted(d.as("ci", "POST", "/v1/locks/a%2F1/acquire", acquire))
		d.as("ci", "POST", "/v1/locks/a%2F1/acquire", acquire) // the same request
		for range 2 {
			d.as("ci", "POST", "/v1/locks/a%2F1/release", released(lock))
		}
		d.as("ci", "POST", "/v1/locks/b/acquire", acquire)
		d.as("ci", "POST", "/v1/locks:acquireAll", `{"ownerId":"o","ttlMillis":60000,"requests":[{"lockKey":"a/2"},{"lockKey":"c"}]}`)
		d.as("ci", "GET", "/v1/locks/-?name=d", "")
		d.as("ops", "GET", "/v1/locks", "")
		d.as("", "POST", "/v1/locks/a%2F1/acquire", acquire)
		d.send(t.Context(), "GET", "/v1/locks", "", func(r *http.Request) { r.Header.Set("Authorization", "Bearer flk_x") })
		d.as("ci", "POST", "/v1/locks/a%2F3/acquire", `{"ownerId":"o","ttlMillis":60000}`)
		d.as("ops", "POST", "/v1/locks/a%2F3/force-release", `{"reason":"it hangs"}`)
		d.as("ci", "GET", "/livez", "")

		synctest.Wait()
		text, err := os.ReadFile(filepath.Join(d.dir, "audit.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		digest := d.rules.Load().Digest()
		var got []audit.Event
		for line := range bytes.Lines(text) {
			var e audit.Event
			if err := json.Unmarshal(line, &e); err != nil {
				t.Fatal(err)
			}
			if e.Server != "here" || e.From == "" || e.Time.IsZero() || e.Rules != digest || e.Outcome == audit.Denied && e.Reason == "" {
				t.Errorf("%s", line)
			}
			got = append(got, audit.Event{
				Event: e.Event, Outcome: e.Outcome, Principal: e.Principal, Name: e.Name, Owner: e.Owner, Holder: e.Holder,
			})
		}
		held := func(event, name string) audit.Event {
			return audit.Event{
				Event: event, Outcome: audit.Done, Principal: "token:ci", Name: name, Owner: "o", Holder: "token:ci",
			}
		}
		denied := func(who, event, name string) audit.Event {
			return audit.Event{Event: event, Outcome: audit.Denied, Principal: who, Name: name}
		}
		nobody := "address:127.0.0.1"
		want := []audit.Event{
			held("acquire", "a/1"), held("release", "a/1"), denied("token:ci", "acquire", "b"),
			denied("token:ci", "acquire-all", "c"), denied("token:ci", "get", "d"), denied("token:ops", "list", ""),
			denied(nobody, "acquire", "a/1"), denied(nobody, "request", "GET /v1/locks"), held("acquire", "a/3"),
			{Event: "force-release", Outcome: audit.Done, Principal: "token:ops", Name: "a/3"},
		}
		if len(got) != len(want) {
			t.Fatalf("%d events:\n%s", len(got), text)
		}
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("event %d: %+v, want %+v", i, got[i], want[i])
			}
		}
	})
}
