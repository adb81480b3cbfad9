package gateway

import (
	"bufio"
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/backend/memory"
)

// The page loads nothing from other sites: its policy forbids that, and its text names no other site. Other sites may
// link to the page, but not to its data.
func TestPageIsClosed(t *testing.T) {
	driver := memory.New(nil)
	d := newDoor(t, driver)
	defer driver.Close(context.Background())
	defer d.g.Close(context.Background())
	for _, path := range []string{"/", "/page.js", "/page.css", "/page/service"} {
		got := d.get(path)
		if got.status != http.StatusOK || got.header.Get("Content-Security-Policy") != pagePolicy ||
			got.header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s is answered %d with %v", path, got.status, got.header)
		}
		for line := bufio.NewScanner(strings.NewReader(got.text)); line.Scan(); {
			if strings.Contains(line.Text(), "//") && strings.Contains(line.Text(), "http") {
				t.Errorf("%s names another place: %s", path, line.Text())
			}
		}
		if strings.Contains(got.text, "style=") || strings.Contains(got.text, "onclick=") {
			t.Errorf("%s has what its policy refuses", path)
		}
	}
	linked := func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }
	if got := d.send(t.Context(), http.MethodGet, "/", "", linked); got.status != http.StatusOK {
		t.Errorf("a link to the page is answered %d", got.status)
	}
	d.refuses(d.send(t.Context(), http.MethodGet, "/page/service", "", linked), 403, codeDenied)
	d.refuses(d.send(t.Context(), http.MethodPost, "/", "{}"), 405, codeMethod)
}
