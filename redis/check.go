package redis

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// A look at a queue costs the server more than a peek at hundreds of names. So on one server every name is peeked at
// about once a second, and for the rest many names share the looks of one client per second.
const (
	// restBetween is the minimum time between two looks at a name that is peeked at.
	restBetween = 10 * time.Second
	// looksMore bounds a client's looks per second at names none of which is looked at more often than necessary, and
	// namesALook names allow one more.
	looksMore, namesALook = 3, 150
	// precise is the number of names up to which the end of each hold is settled when it is due. With more, the next
	// peek finds it up to a second later.
	precise = 64
)

// Check is engine.Checks's.
func (s *service) Check(ctx context.Context, all []engine.Waiters, queues int) ([]engine.Found, error) {
	out := make([]engine.Found, len(all))
	var looked, peeked []int
	for i := range all {
		if all[i].Quick {
			peeked = append(peeked, i)
		} else {
			looked = append(looked, i)
		}
	}
	if len(peeked) > 0 {
		found, err := s.peek(ctx, all, peeked)
		if err != nil {
			return nil, err
		}
		looked = append(looked, found...)
	}
	return out, s.look(ctx, all, looked, queues, out)
}

// peek returns the numbers of the queues that deserve a look: the name is free, or this client holds it.
func (s *service) peek(ctx context.Context, all []engine.Waiters, peeked []int) (found []int, err error) {
	var steps []*lines.Step
	for chunk := range slices.Chunk(peeked, redisscript.MaxPeek) {
		step := lines.NewStep(redisscript.Peek, s.keys(all[chunk[0]].Name), strconv.Itoa(len(chunk)), s.identity)
		for _, i := range chunk[1:] {
			step.Others = append(step.Others, s.keys(all[i].Name))
		}
		steps = append(steps, step)
	}
	answers, errs := s.doAll(ctx, steps)
	for n, answer := range answers {
		if errs[n] != nil {
			return nil, errs[n]
		}
		chunk := peeked[n*redisscript.MaxPeek : min((n+1)*redisscript.MaxPeek, len(peeked))]
		worth, _ := redisscript.ParsePeeked(answer, len(chunk))
		for _, each := range worth {
			found = append(found, chunk[each])
		}
	}
	return found, nil
}

// look asks for the state of the waiters of each queue, which shows the server that they live, and settles.
func (s *service) look(
	ctx context.Context, all []engine.Waiters, looked []int, queues int, out []engine.Found,
) error {
	steps := make([]*lines.Step, len(looked))
	asked := make([][]engine.Entering, len(looked))
	for n, i := range looked {
		asked[n] = all[i].All[:min(len(all[i].All), redisscript.MaxLook)] // in no order: later looks carry the others
		steps[n] = lines.NewStep(redisscript.Look, s.keys(all[i].Name))
		steps[n].Args = append(make([]string, 0, 1+len(asked[n])), s.identity)
		for _, e := range asked[n] {
			steps[n].Args = append(steps[n].Args, redisscript.NonceIn(e.Place))
		}
	}
	answers, errs := s.doAll(ctx, steps)
	for n, i := range looked {
		found, ok := redisscript.ParseLooked(answers[n], len(asked[n]))
		if errs[n] != nil || !ok {
			out[i].Again = redisscript.Jitter(lookAgain)
			continue
		}
		c := &out[i]
		c.Quick = !s.lines.Sharded.Load() && !found.Shared
		c.Again = nextLook(queues, found.Length, c.Quick)
		if found.ExpiresIn >= 0 && (!c.Quick || queues <= precise) {
			c.Again = min(c.Again, redisscript.SettleIn(found.ExpiresIn))
		}
		if len(asked[n]) < len(all[i].All) {
			c.Again = min(c.Again, redisscript.FirstLook())
		}
		for k, place := range found.Places {
			if place != redisscript.PlaceQueued {
				c.Turns = append(c.Turns, k)
			}
		}
	}
	return nil
}

// lookAgain is the pause after a look that failed.
const lookAgain = 500 * time.Millisecond

// nextLook returns the time between two looks at one of so many names, with so many places in its queue. Looks that are
// due are spread evenly over twice their share of the client's looks, so that names with waits that began together are
// looked at apart from then on.
func nextLook(names, places int, peeked bool) time.Duration {
	d := redisscript.NextLook(places)
	if peeked {
		d = max(d, redisscript.Jitter(restBetween))
	}
	share := time.Duration(names) * time.Second / time.Duration(looksMore+names/namesALook)
	return max(d, redisscript.Jitter(share)+share/2)
}
