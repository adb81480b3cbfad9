package pagetest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/internal/gateway"
)

// evilHost is a name that the browser resolves to this machine, as the DNS server of an attacker would.
const evilHost = "evil.test"

// evilPage lists the locks of its own origin, breaks one, acquires it, and keeps the answers.
const evilPage = `<!doctype html><title>evil</title><script>
const calls = [
	["GET", "/v1/locks?limit=2"],
	["POST", "/v1/locks/victim/force-release", {reason: "mine now"}],
	["POST", "/v1/locks/victim/acquire", {ownerId: "evil", ttlMillis: 600000}],
]
window.answers = ""
async function attack() {
	const all = []
	for (const [method, path, body] of calls) {
		const r = await fetch(path, {
			method, body: body && JSON.stringify(body), headers: body && {"Content-Type": "application/json"},
		})
		all.push({status: r.status, text: await r.text()})
	}
	window.answers = JSON.stringify(all)
}
</script>`

// A page with a name that resolves to the gateway after the page was loaded (DNS rebinding) gets no answer but 421: the
// browser takes both for one origin, so that only the name in Host shows the difference. Where an operator permits the
// name the same page breaks and takes the lock, which shows that the browser stops nothing of it.
func TestRebinding(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		hosts []string
		want  []int
		owner string
	}{
		{"refused", nil, []int{421, 421, 421}, "honest"},
		{"the name is permitted", []string{evilHost}, []int{200, 200, 200}, "evil"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			x := open(t)
			d := memory.NewStore(nil).Driver()
			g, err := gateway.New(gateway.Options{Driver: d, Log: slog.New(slog.DiscardHandler), Hosts: c.hosts})
			if err != nil {
				t.Fatal(err)
			}
			var rebound atomic.Bool // the name leads to the gateway
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if rebound.Load() {
					g.Handler().ServeHTTP(w, r)
					return
				}
				w.Header().Set("Content-Type", "text/html")
				_, _ = io.WriteString(w, evilPage)
			}))
			t.Cleanup(func() {
				g.End()
				s.CloseClientConnections()
				s.Close()
				g.Close(context.Background())
			})
			take(t, d, request("victim", "honest"))

			x.do(chromedp.Navigate("http://" + evilHost + strings.TrimPrefix(s.URL, "http://127.0.0.1") + "/"))
			x.await("the page is there", `typeof attack === "function"`)
			rebound.Store(true)
			value[bool](x, "(attack(), true)")
			x.await("the attack is over", `window.answers !== ""`)
			var answers []struct {
				Status int
				Text   string
			}
			if err := json.Unmarshal([]byte(value[string](x, "window.answers")), &answers); err != nil {
				t.Fatal(err)
			}
			var got []int
			for _, a := range answers {
				got = append(got, a.Status)
			}
			if fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("the page was answered %+v, want %v", answers, c.want)
			}
			state, err := d.Look(t.Context(), "victim")
			if err != nil || len(state.Holders) != 1 || state.Holders[0].Owner != c.owner {
				t.Errorf("after the attack: %+v, %v; want the holder %q", state, err, c.owner)
			}
		})
	}
}
