package redisscript

import (
	"strings"
	"testing"
	"time"
)

func TestHoldRoundTrip(t *testing.T) {
	for _, h := range []Hold{
		{PX: time.Second, Client: "c", Nonce: "1", Request: "r", ID: "id-_9", Owner: "o"},
		{PX: time.Millisecond, Client: "c", Nonce: "1", Request: "r"},
		{
			PX: time.Hour, Client: "c", Nonce: "99", Request: "r-_", ID: "i",
			Owner: "a|b|c", Metadata: "{\"a\":\"|\\n\"}\n",
		},
		{PX: time.Second, Shared: true, Client: "c", Nonce: "1", Request: "r", ID: "id-_9", Owner: "o"},
		{
			PX: time.Second, Permits: 2, Limit: 1<<31 - 1, Client: "c", Nonce: "1", Request: "r",
			ID: "id-_9", Owner: "o", Metadata: "{}",
		},
	} {
		got, ok := ParseHold(h.Value())
		if !ok || got != h {
			t.Errorf("%+v became %+v", h, got)
		}
		if !strings.HasPrefix(h.Value(), h.Start()) {
			t.Errorf("%q does not start with %q", h.Value(), h.Start())
		}
	}
	for _, v := range []string{
		"", "-", "foreign", "1|2|3", "1|2|3|4", "1|2|3|4|5", "x|2|3|4|5|6", "s|2|3|4|5|6", "p1/2|2|3|4|5|6",
		"p3/2/1|2|3|4|5|6", "p0/2/1|2|3|4|5|6", "p/2/1|2|3|4|5|6", "p1/2/s1|2|3|4|5|6",
	} {
		if h, ok := ParseHold(v); ok {
			t.Errorf("%q was read as %+v", v, h)
		}
	}
}

// Holds that differ in their share alone differ in what decides.
func TestSharesAreReported(t *testing.T) {
	seen := map[string]Hold{}
	for _, h := range []Hold{
		{PX: 1}, {PX: 1, Shared: true}, {PX: 1, Permits: 1, Limit: 1}, {PX: 1, Permits: 1, Limit: 11},
		{PX: 1, Permits: 11, Limit: 11},
	} {
		if other, dup := seen[h.Start()]; dup {
			t.Errorf("%+v and %+v are both %q", h, other, h.Start())
		}
		seen[h.Start()] = h
	}
}
