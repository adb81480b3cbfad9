package nemesis

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/check"
)

// collector receives all events of all clients, and tracks their holds and waits.
type collector struct {
	marks *check.Recorder // faults, and clients that were killed

	mu      sync.Mutex // protects the following fields
	events  []check.Event
	pending map[call]check.Event       // calls in flight
	holds   map[call]string            // held names, by the call that acquired them
	grants  map[grantee]int            // number of grants so far
	asked   map[string]backend.Instant // by process: the beginning of its latest granted call
	changed chan struct{}              // closed at the next event
	broken  error                      // an invalid line
}

// call is a call of a client. Client is the name of a process: "c2.1".
type call struct {
	client string
	id     uint64
}

// grantee is a client that was granted a name. Client is the name of the client without a process: "c2".
type grantee struct{ client, name string }

func newCollector() *collector {
	c := &collector{
		pending: map[call]check.Event{}, holds: map[call]string{}, grants: map[grantee]int{},
		asked:   map[string]backend.Instant{},
		changed: make(chan struct{}),
	}
	c.marks = check.NewRecorder(check.Options{Writer: marks{c}, StreamOnly: true})
	return c
}

// marks is the writer of the recorder of the marks.
type marks struct{ c *collector }

func (m marks) Write(line []byte) (int, error) {
	m.c.take(string(line))
	return len(line), nil
}

// take processes one event.
func (c *collector) take(line string) {
	var e check.Event
	err := json.Unmarshal([]byte(line), &e)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.broken = fmt.Errorf("%w in the line %q", err, line)
		return
	}
	c.events = append(c.events, e)
	process, _, _ := strings.Cut(e.Client, "/")
	this := call{process, e.ID}
	switch e.Type {
	case check.TypeCall:
		c.pending[this] = e
		if e.Op == check.OpRelease {
			delete(c.holds, call{process, e.Hold})
		}
	case check.TypeReturn:
		began := c.pending[this].At
		delete(c.pending, this)
		if e.Outcome == check.OK && (e.Op == check.OpAcquire || e.Op == check.OpTry) {
			c.holds[this] = e.Name
			c.asked[process] = max(c.asked[process], began)
			client, _, _ := strings.Cut(process, ".")
			c.grants[grantee{client, e.Name}]++
		}
	case check.TypeEnd:
		delete(c.holds, this)
	case check.TypeKilled:
		forget(c.pending, e.Client)
		forget(c.holds, e.Client)
	}
	close(c.changed)
	c.changed = make(chan struct{})
}

func forget[V any](m map[call]V, process string) {
	for k := range m {
		if k.client == process {
			delete(m, k)
		}
	}
}

// epoch removes and returns the events of the names of an epoch, and all marks so far. No client uses these names any
// more.
func (c *collector) epoch(epoch int) check.History {
	prefix := slot{}.name(epoch)
	c.mu.Lock()
	defer c.mu.Unlock()
	var of check.History
	var rest []check.Event
	for _, e := range c.events {
		switch {
		case e.Name == "" || strings.HasPrefix(e.Name, prefix):
			of.Events = append(of.Events, e)
		default:
			rest = append(rest, e)
		}
	}
	c.events = rest
	for k := range c.grants {
		if strings.HasPrefix(k.name, prefix) {
			delete(c.grants, k)
		}
	}
	return check.Merge(of)
}

// standing returns the numbers of a process's holds and waits.
func (c *collector) standing(process string) (holds, waits int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.holds {
		if k.client == process {
			holds++
		}
	}
	for k, e := range c.pending {
		if k.client == process && e.Op == check.OpAcquire {
			waits++
		}
	}
	return holds, waits
}

// served reports whether a process was granted a request that it made after since.
func (c *collector) served(process string, since backend.Instant) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asked[process] > since
}

// count returns a copy of the grants so far, and a channel that is closed at the next event.
func (c *collector) count() (map[grantee]int, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make(map[grantee]int, len(c.grants))
	for k, n := range c.grants {
		all[k] = n
	}
	return all, c.changed
}

// want is a required grant, in words and as a condition.
type want struct {
	what string
	fits func(grantee) bool
}

// granted waits until a later grant has met each want.
func (c *collector) granted(ctx context.Context, when string, wants []want) error {
	before, _ := c.count()
	for {
		now, changed := c.count()
		var missing []string
		for _, w := range wants {
			met := false
			for k, n := range now {
				met = met || n > before[k] && w.fits(k)
			}
			if !met {
				missing = append(missing, w.what)
			}
		}
		if len(missing) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s: no grant for %s: %w", when, strings.Join(missing, ", "), ctx.Err())
		}
	}
}
