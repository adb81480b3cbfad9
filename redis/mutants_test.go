package redis

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testfindings"
)

// TestMutants shows that the checks of offers and of the queue's order fail for scripts with one fault.
func TestMutants(t *testing.T) {
	t.Parallel()
	c := startServer(t).admin(t)
	for i, m := range []struct{ what, text, instead string }{
		{what: "nothing"},
		{"an offer lasts as long as a hold", "local ms = math.min(px, OFFER_MS)", "local ms = px"},
		{"a client whose offer expired is offered the lock again", "if not g then forsake(queue, seen) end", ""},
		{"an accepted offer is not prolonged", "\t\tprolong(lock, ms)\n\t\tcall('HDEL', seen", "\t\tcall('HDEL', seen"},
		{
			"an accepted offer is recorded as expired",
			"\t\tcall('HDEL', seen, '!' .. whose(v), '?' .. whose(v))\n\t\treturn 1", "return 1",
		},
		{"an attempt overtakes the queue", "step == 't' and call('EXISTS', queue) == 0 then", "step == 't' then"},
		{"a new waiter overtakes the queue", "if call('RPUSHX', queue, v) > 0 then return 0 end", ""},
		{"a release offers the lock to no waiter", "elseif not promote(lock, queue, seen) then", "else"},
	} {
		source := redisscript.Source
		if m.text != "" {
			if n := strings.Count(source, m.text); n != 1 {
				t.Errorf("%s: what it changes is %d times in the script", m.what, n)
			}
			source = strings.Replace(source, m.text, m.instead, 1)
		}
		var killers []string
		for name, check := range map[string]func(*goredis.Client, string, string) error{
			"offers": checkOffers, "order": checkOrder,
		} {
			err := check(c, source, fmt.Sprint(name, i))
			for again := range 10 {
				if err == nil || m.text != "" {
					break
				}
				err = check(c, source, fmt.Sprint(name, "-", again)) // on a stalled machine offers expire
			}
			if err != nil {
				t.Logf("%s: %v", m.what, err)
				killers = append(killers, "script "+name)
			}
		}
		switch {
		case m.text == "" && killers != nil:
			t.Error("the script as it is does not pass")
		case m.text != "" && killers == nil:
			t.Errorf("%s: nothing shows it", m.what)
		case m.text != "":
			testfindings.Write(t, testfindings.Mutant{What: "redis: " + m.what, Killers: strings.Join(killers, " ")})
		}
	}
}

// line is a held name with three places in its queue: two of a client that never answers, and one of a client that
// answers.
type line struct {
	c           *goredis.Client
	source      string
	name        string
	keys        redisscript.Keys
	holder      redisscript.Hold
	ghost, live redisscript.Hold
	listen      *goredis.PubSub
}

func newLineOf(c *goredis.Client, source, name string) (*line, error) {
	hold := func(client, nonce string) redisscript.Hold {
		return redisscript.Hold{
			PX: time.Minute, Client: client, Nonce: nonce, Request: name + client + nonce, Owner: "o",
		}
	}
	l := &line{
		c: c, source: source, name: name, keys: redisscript.KeysOf("fencelock:", name),
		holder: hold("holder", "1"), ghost: hold("ghost", "1"), live: hold("live", "1"),
	}
	ctx := context.Background()
	l.listen = c.PSubscribe(ctx, "*") // so that all clients seem to be subscribed
	if _, err := l.listen.Receive(ctx); err != nil {
		return nil, err
	}
	if answer := l.step(redisscript.Wait, l.holder.Value(), "60000"); answer != int64(1) {
		return nil, fmt.Errorf("the first one is answered %v", answer)
	}
	for _, h := range []redisscript.Hold{l.ghost, hold("ghost", "2"), l.live} {
		if answer := l.step(redisscript.Wait, h.Value(), "60000"); answer != int64(0) {
			return nil, fmt.Errorf("one who has to wait is answered %v", answer)
		}
	}
	if answer := l.step(redisscript.Release, l.holder.Start(), "0"); answer != int64(redisscript.Offered) {
		return nil, fmt.Errorf("a release before others who wait is answered %v", answer)
	}
	return l, nil
}

// step returns the answer to one step, or its error.
func (l *line) step(code string, args ...string) any {
	answers, err := runSource(l.c, l.source, append([]string{l.name, code}, args...))
	if err != nil {
		return err
	}
	return answers[0]
}

// lapse ends the present hold or offer, as its time to live does.
func (l *line) lapse() { l.c.Del(context.Background(), l.keys.Lock) }

// checkOffers: a hand-over is an offer, which expires soon. A client that lets it expire loses all of its places; a
// client that accepts it gets the whole TTL.
func checkOffers(c *goredis.Client, source, name string) error {
	l, err := newLineOf(c, source, name)
	if err != nil {
		return err
	}
	defer l.listen.Close()
	ctx := context.Background()
	if left := c.PTTL(ctx, l.keys.Lock).Val(); left > redisscript.OfferTime {
		return fmt.Errorf("an offer lasts for %v", left)
	}
	l.lapse()
	if answer := l.step(redisscript.Settle); c.Get(ctx, l.keys.Lock).Val() != l.live.Value() {
		return fmt.Errorf("after an offer that ended the next is made to %q (%v)",
			c.Get(ctx, l.keys.Lock).Val(), answer)
	}
	if answer := l.step(redisscript.Accept, l.live.Start(), "60000"); answer != int64(1) {
		return fmt.Errorf("accepting is answered %v", answer)
	}
	if left := c.PTTL(ctx, l.keys.Lock).Val(); left <= redisscript.OfferTime {
		return fmt.Errorf("what was accepted lasts for %v", left)
	}
	if noted := c.HGetAll(ctx, l.keys.Seen).Val(); len(noted) > 0 {
		return fmt.Errorf("after it was accepted the offer is still noted: %v", noted)
	}
	return nil
}

// checkOrder: when a hold or an offer has expired, no request is granted before the waiters.
func checkOrder(c *goredis.Client, source, name string) error {
	for code, refused := range map[string]func(any) bool{
		redisscript.Try:  func(answer any) bool { _, ok := answer.([]any); return ok },
		redisscript.Wait: func(answer any) bool { return answer == int64(0) },
	} {
		l, err := newLineOf(c, source, name+code)
		if err != nil {
			return err
		}
		defer l.listen.Close()
		l.lapse()
		late := redisscript.Hold{PX: time.Minute, Client: "late", Nonce: "1", Request: name + "late", Owner: "o"}
		if answer := l.step(code, late.Value(), "60000"); !refused(answer) {
			return fmt.Errorf("step %s of one who comes later is answered %v", code, answer)
		}
	}
	return nil
}
