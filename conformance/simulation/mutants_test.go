package simulation

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/testfindings"
)

// mutant is one fault of a driver, which some seed must detect.
type mutant struct {
	name   string
	shows  string // a part of one of the violations
	change func(p *port)
}

var mutants = []mutant{
	{"SentAt is read when the answer arrives", "began while", func(p *port) {
		acquire, renew := p.acquire, p.renew
		p.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := acquire(ctx, r)
			g.SentAt = backend.GoClock().Now()
			return g, err
		}
		p.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := renew(ctx, grants)
			for i := range out {
				out[i].SentAt = backend.GoClock().Now()
			}
			return out
		}
	}},
	{"holds end early", "began while", func(p *port) {
		acquire, renew := p.acquire, p.renew
		p.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			full := r.TTL
			r.TTL = full * 8 / 10
			g, err := acquire(ctx, r)
			g.TTL = full
			return g, err
		}
		p.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			short := append([]backend.Grant(nil), grants...)
			for i := range short {
				short[i].TTL = short[i].TTL * 8 / 10
			}
			out := renew(ctx, short)
			for i := range out {
				out[i].TTL = grants[i].TTL
			}
			return out
		}
	}},
	{"renewal recreates a missing hold", "still believed in", func(p *port) {
		renew := p.renew
		p.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := renew(ctx, grants)
			for i, g := range grants {
				if !errors.Is(out[i].Err, backend.ErrNotHeld) {
					continue
				}
				sent := backend.GoClock().Now()
				again, err := p.Driver.Acquire(ctx, backend.Request{
					Name: g.Name, Owner: g.Owner, RequestID: g.RequestID, TTL: g.TTL, Kind: g.Kind,
					Permits: g.Permits, Limit: g.Limit,
				})
				if err == nil {
					out[i] = backend.Renewal{SentAt: sent, TTL: again.TTL}
				}
			}
			return out
		}
		unpushed(p)
	}},
	{"a renewal without an answer is reported as success", "began while", func(p *port) {
		renew := p.renew
		p.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			sent := backend.GoClock().Now()
			out := renew(ctx, grants)
			for i := range out {
				if errors.Is(out[i].Err, backend.ErrUnknown) {
					out[i] = backend.Renewal{SentAt: sent, TTL: grants[i].TTL}
				}
			}
			return out
		}
	}},
	{"an acquire without an answer is reported as granted", "began while", func(p *port) {
		acquire := p.acquire
		p.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			sent := backend.GoClock().Now()
			g, err := acquire(ctx, r)
			if errors.Is(err, backend.ErrUnknown) {
				g = r.Grant()
				g.Token, g.SentAt = fencing.Token(sent), sent
				if r.Kind != backend.KindExclusive {
					g.Token = g.Token.NotExclusive()
				}
				return g, nil
			}
			return g, err
		}
	}},
	{"an attempt that finds the lock held is granted", "began while", func(p *port) {
		acquire := p.acquire
		p.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			sent := backend.GoClock().Now()
			g, err := acquire(ctx, r)
			if errors.Is(err, backend.ErrHeld) && r.Kind == backend.KindExclusive {
				g = r.Grant()
				g.Token, g.SentAt = fencing.Token(sent), sent
				return g, nil
			}
			return g, err
		}
	}},
	{"two grants have the same token", "have one token", func(p *port) {
		acquire := p.acquire
		p.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := acquire(ctx, r)
			g.Token &^= 6
			if err == nil && g.Token.Order() == 0 {
				g.Token |= 1
			}
			return g, err
		}
		p.release = func(ctx context.Context, g backend.Grant) error {
			if original, err := fencing.ParseToken(g.Incarnation); err == nil {
				g.Token = marked(original, g.Kind)
			}
			return p.Driver.Release(ctx, g)
		}
		p.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			own := append([]backend.Grant(nil), grants...)
			for i := range own {
				if original, err := fencing.ParseToken(own[i].Incarnation); err == nil {
					own[i].Token = marked(original, own[i].Kind)
				}
			}
			return p.Driver.Renew(ctx, own)
		}
	}},
	{"a release ends the hold of another holder", "nobody took it", func(p *port) {
		release := p.release
		p.release = func(ctx context.Context, g backend.Grant) error {
			err := release(ctx, g)
			if errors.Is(err, backend.ErrNotHeld) {
				p.Store().Evict(g.Name)
			}
			return err
		}
	}},
	{"a release is not sent", "had no turn", func(p *port) {
		p.release = func(context.Context, backend.Grant) error { return nil }
	}},
	{"a failed renewal is reported as a loss", "nobody took it", func(p *port) {
		renew := p.renew
		p.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := renew(ctx, grants)
			for i := range out {
				if out[i].Err != nil {
					out[i].Err = &backend.NotHeldError{Name: grants[i].Name}
				}
			}
			return out
		}
	}},
	{"calls continue after their context ends", "after the end of its context", func(p *port) {
		acquire := p.acquire
		p.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			longer, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			defer cancel()
			defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, cancel) })()
			return acquire(longer, r)
		}
	}},
	{"the clock of a machine runs 15 percent slow", "began while", func(p *port) {
		if p.node.opened == 0 { // it belongs to the machine and not to the client
			p.node.clock.ppm = -150_000
		}
	}},
}

// unpushed drops the service's pushes of losses.
func unpushed(p *port) {
	acquire, all := p.acquire, p.all
	p.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		r.Lost = nil
		return acquire(ctx, r)
	}
	p.all = func(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
		for i := range rs {
			rs[i].Lost = nil
		}
		return all(ctx, rs)
	}
}

func marked(t fencing.Token, k backend.Kind) fencing.Token {
	if k != backend.KindExclusive {
		return t.NotExclusive()
	}
	return t
}

// TestMutants breaks the driver in one way at a time, and requires that one of the first seeds detects it.
func TestMutants(t *testing.T) {
	const seeds = 200
	for _, m := range mutants {
		t.Run(strings.ReplaceAll(m.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			for seed := uint64(1); seed <= seeds; seed++ {
				for _, v := range simulate(t, seed, how{corrupt: m.change}).violations {
					if strings.Contains(v, m.shows) {
						testfindings.Write(t, testfindings.Mutant{What: m.name, Killers: fmt.Sprintf("seed %d", seed)})
						t.Logf("%-56s killed by seed %d\n%s", m.name, seed, v)
						return
					}
				}
			}
			t.Errorf("this mutant survives %d seeds", seeds)
		})
	}
}
