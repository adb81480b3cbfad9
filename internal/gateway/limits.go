package gateway

import (
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/fencelock/fencelock/backend"
)

// Limits bound a replica's state and request rate: in total, and for one client, which is a principal, a certificate or
// an address. Zero means the default, or no limit if the default is 0.
type Limits struct {
	// Connections and ClientConnections are for the listener's owner.
	Connections, ClientConnections int
	Waits, ClientWaits             int
	Watches, ClientWatches         int
	Holds, ClientHolds             int
	ClientSessions                 int
	Operations, ClientOperations   int // a second
}

// Limit is one of Limits.
type Limit struct {
	Name    string // also the quota in an answer
	Value   *int
	Default int
	About   string
}

// All lists the limits.
func (l *Limits) All() []Limit {
	return []Limit{
		{"connections", &l.Connections, 0, "connections over HTTP; 0: as the file descriptors of the process allow"},
		{"client-connections", &l.ClientConnections, 0, "connections of one address; 0: a quarter of what the file descriptors allow"},
		{"waits", &l.Waits, 10_000, "waiting requests"},
		{"client-waits", &l.ClientWaits, 1_000, "waiting requests of one client"},
		{"watches", &l.Watches, 10_000, "watches"},
		{"client-watches", &l.ClientWatches, 1_000, "watches of one client"},
		{"holds", &l.Holds, 250_000, "holds and attempts of this replica"},
		{"client-holds", &l.ClientHolds, 62_500, "holds and attempts of one client"},
		{"client-sessions", &l.ClientSessions, 64, "different TTLs that one client uses at a time, with services " +
			"where each TTL is a session"},
		{"operations", &l.Operations, 0, "requests per second; 0: unlimited"},
		{"client-operations", &l.ClientOperations, 0, "requests per second of one client; 0: unlimited"},
	}
}

func (l Limits) withDefaults() Limits {
	for _, x := range l.All() {
		if *x.Value == 0 {
			*x.Value = x.Default
		}
	}
	return l
}

// share counts the clients' use of one resource. Gateway.mu protects it.
type share struct {
	name          string
	most, mostOne int
	all           int
	of            map[string]int // by principal
}

func newShare(name string, most, mostOne int) share {
	return share{name: name, most: most, mostOne: mostOne, of: map[string]int{}}
}

// enter counts n, or returns the exhausted quota.
func (s *share) enter(principal string, n int) *Problem {
	switch {
	case s.of[principal]+n > s.mostOne:
		return quota("client-"+s.name, "one client has at most "+strconv.Itoa(s.mostOne)+" "+s.name)
	case s.all+n > s.most:
		return quota(s.name, "there are at most "+strconv.Itoa(s.most)+" "+s.name)
	}
	s.add(principal, n)
	return nil
}

// add counts n regardless of the quotas.
func (s *share) add(principal string, n int) {
	s.all += n
	s.of[principal] += n
}

func (s *share) leave(principal string, n int) {
	s.all -= n
	if s.of[principal] -= n; s.of[principal] == 0 {
		delete(s.of, principal)
	}
}

// sessions counts the TTLs that clients use. The service has a session for each, which ends one TTL after its last use.
// Gateway.mu protects it.
type sessions struct {
	most  int
	of    map[string]map[time.Duration]backend.Instant // the end of each TTL's session, by principal
	sweep int                                          // the number of principals before the next sweep
}

// use records that a client uses a TTL. Unless must is set, it returns the exhausted quota if the client has too many
// others.
func (s *sessions) use(principal string, ttl time.Duration, must bool, now backend.Instant) *Problem {
	own := s.of[principal]
	expire(own, now)
	if _, used := own[ttl]; !used && !must && len(own) >= s.most {
		return quota("client-sessions", "one client may use at most "+strconv.Itoa(s.most)+" different TTLs")
	}
	if own == nil {
		if own = map[time.Duration]backend.Instant{}; s.of == nil {
			s.of = map[string]map[time.Duration]backend.Instant{}
		}
		s.of[principal] = own
	}
	own[ttl] = max(own[ttl], now.Add(ttl))
	if len(s.of) > s.sweep {
		for principal, own := range s.of {
			if expire(own, now); len(own) == 0 {
				delete(s.of, principal)
			}
		}
		s.sweep = 2*len(s.of) + 64
	}
	return nil
}

func expire(own map[time.Duration]backend.Instant, now backend.Instant) {
	for ttl, until := range own {
		if until <= now {
			delete(own, ttl)
		}
	}
}

// rates bounds the requests a second. All methods are safe for concurrent use.
type rates struct {
	all *rate.Limiter // nil: no limit
	one int           // a second; 0: no limit

	mu    sync.Mutex // protects the following fields
	of    map[string]*rate.Limiter
	sweep int // the number of clients before the next sweep
}

func newRates(l *Limits) *rates {
	r := &rates{one: l.ClientOperations, of: map[string]*rate.Limiter{}}
	if n := l.Operations; n > 0 {
		r.all = rate.NewLimiter(rate.Limit(n), n)
	}
	return r
}

// enter counts a request, or returns the exhausted quota. A client may send the requests of one second in one burst.
func (r *rates) enter(principal string) *Problem {
	if l := r.client(principal); l != nil && !l.Allow() {
		return quota("client-operations", "one client sends at most "+strconv.Itoa(r.one)+" requests per second")
	}
	if r.all != nil && !r.all.Allow() {
		return quota("operations", "at most "+strconv.Itoa(r.all.Burst())+" requests per second are accepted")
	}
	return nil
}

func (r *rates) client(principal string) *rate.Limiter {
	if r.one == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.of[principal]
	if l == nil {
		l = rate.NewLimiter(rate.Limit(r.one), r.one)
		r.of[principal] = l
	}
	if len(r.of) > r.sweep {
		now := time.Now()
		for other, l := range r.of {
			if other != principal && l.TokensAt(now) >= float64(r.one) { // a new limiter would have as many
				delete(r.of, other)
			}
		}
		r.sweep = 2*len(r.of) + 64
	}
	return l
}
