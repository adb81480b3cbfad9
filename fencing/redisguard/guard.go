package redisguard

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/fencing"
)

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Prefix is in front of the guard's keys. Default "fencing:".
	Prefix string
}

// Guard guards the resources of one Redis. It is safe for concurrent use.
type Guard struct {
	client  redis.UniversalClient
	prefix  string
	cluster bool // the terms are in a slot of their own
}

var (
	_ fencing.Guard  = (*Guard)(nil)
	_ fencing.Keeper = (*Guard)(nil)
)

// New returns a guard that uses the client, any of go-redis. It does no I/O. The error is a *fencing.InvalidError that
// names what cannot be used.
func New(client redis.UniversalClient, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	if client == nil {
		return nil, fmt.Errorf("redisguard: new: %w", &fencing.InvalidError{What: "client", Why: "it is nil"})
	}
	if strings.Contains(o.Prefix, "{") {
		return nil, fmt.Errorf("redisguard: new: %w", &fencing.InvalidError{
			What: "prefix", Value: o.Prefix, Why: "{ would take the place of the resource in the choice of a slot",
		})
	}
	g := &Guard{client: client, prefix: o.Prefix}
	switch client.(type) {
	case *redis.ClusterClient, *redis.Ring:
		g.cluster = true
	}
	if g.prefix == "" {
		g.prefix = "fencing:"
	}
	return g, nil
}

// Key returns the key that the guard keeps for a resource.
func (g *Guard) Key(resource string) string { return g.prefix + "{" + resource + "}" }

// TermsKey returns the key that the guard keeps for all.
func (g *Guard) TermsKey() string { return g.prefix + "terms" }

// Check shows the claims: from then on lower tokens are refused. A write that follows is another step, which others may
// overtake; see Update and Do.
func (g *Guard) Check(ctx context.Context, claims fencing.Claims) error {
	_, err := g.run(ctx, "check", claims, checkOnly, nil, nil)
	return err
}

// Do checks the claims and, if they are admitted, writes, in one step of the server; it returns what write returned, as
// go-redis reads it, and nil for a nil. An error of the write, raised or returned, is Do's and no refusal; the tokens
// are remembered all the same. Where the hold has made the write before (Claim.Sequence), Do returns what that
// returned.
func (g *Guard) Do(ctx context.Context, claims fencing.Claims, write *Write, keys []string, args ...any) (any, error) {
	if write == nil {
		return nil, fmt.Errorf("redisguard: do: %w", &fencing.InvalidError{What: "write", Why: "it is nil"})
	}
	return g.run(ctx, "do", claims, write, keys, args)
}

// Update shows the claims, reads the value of key, and writes what f makes of it, if the claims are still admitted and
// the value is still the same; otherwise it begins anew, until ctx ends. The old value is nil if there is none, and a
// new one of nil deletes the key; an expiry stays as it is. An error of f is Update's, and nothing is written. F may be
// called more than once, so it has no effects of its own.
func (g *Guard) Update(ctx context.Context, claims fencing.Claims, key string,
	f func(old []byte) ([]byte, error)) error {
	if f == nil {
		return fmt.Errorf("redisguard: update: %w", &fencing.InvalidError{What: "function", Why: "it is nil"})
	}
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("redisguard: update: %w", err)
	}
	looking := make(fencing.Set, len(list)) // the reading is no write of the hold, and needs no order
	for i, c := range list {
		looking[i] = c.At(0)
	}
	for {
		answer, err := g.run(ctx, "update", looking, get, []string{key}, nil)
		if err != nil {
			return err
		}
		var old []byte
		condition := "0"
		if text, ok := answer.(string); ok {
			old, condition = []byte(text), "1"+text
		}
		value, err := f(old)
		if err != nil {
			return err
		}
		set := ""
		if value != nil {
			set = "1" + string(value)
		}
		_, err = g.run(ctx, "update", fencing.Set(list), swap, []string{key}, []any{condition, set})
		var theirs redis.Error
		if !errors.As(err, &theirs) || !strings.HasPrefix(theirs.Error(), changed) {
			return err
		}
	}
}

func (g *Guard) run(ctx context.Context, call string, claims fencing.Claims, write *Write, keys []string,
	args []any) (any, error) {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return nil, fmt.Errorf("redisguard: %s: %w", call, err)
	}
	fail := func(err error) (any, error) {
		return nil, fmt.Errorf("redisguard: %s %q: %w", call, list[0].Resource, err)
	}
	for {
		if err := ctx.Err(); err != nil {
			return fail(err)
		}
		allKeys, allArgs, err := g.arguments(ctx, list)
		if err != nil {
			return fail(err)
		}
		answer, err := write.script.Run(ctx, g.client, append(allKeys, keys...), append(allArgs, args...)...).Slice()
		if err != nil {
			if theirs := redis.Error(nil); errors.As(err, &theirs) && strings.HasPrefix(theirs.Error(), termsLost) {
				err = fencing.ErrTermsLost
			}
			return fail(err)
		}
		if code, _ := answer[0].(int64); code != 0 {
			if len(answer) < 2 {
				return nil, nil
			}
			return answer[1], nil
		}
		err, old := refused(list, answer)
		if old && g.cluster { // an operator has changed the terms since they were read
			continue
		}
		if !fencing.Refusal(err) {
			return fail(err)
		}
		return nil, err
	}
}

// arguments returns what the script is told of the guard and the claims.
func (g *Guard) arguments(ctx context.Context, claims []fencing.Claim) (keys []string, args []any, _ error) {
	for _, c := range claims {
		keys = append(keys, g.Key(c.Resource))
	}
	args = []any{len(claims), "1", "", "", ""}
	if !g.cluster {
		keys = append(keys, g.TermsKey())
	} else {
		terms, known, err := g.look(ctx, g.TermsKey())
		if err == nil && !known {
			err = g.neverSeen(ctx, claims)
		}
		if err == nil && !known {
			if err = pin.Run(ctx, g.client, []string{g.TermsKey()}, claims[0].Space).Err(); err == nil {
				terms, _, err = g.look(ctx, g.TermsKey())
			}
		}
		if err != nil {
			return nil, nil, err
		}
		args = []any{len(claims), "0", digits(terms.seen.Epoch), terms.space, digits(uint64(terms.seen.Token))}
	}
	for _, c := range claims {
		token := c.Token
		if !token.Exclusive() {
			token = 0 // is refused, and tells what was seen
		}
		args = append(args, digits(uint64(token)), c.Space, digits(c.Sequence))
	}
	return keys, args, nil
}

// neverSeen returns fencing.ErrTermsLost if one of the resources is known, and the terms, which are set before, are
// not.
func (g *Guard) neverSeen(ctx context.Context, claims []fencing.Claim) error {
	for _, c := range claims {
		if _, known, err := g.look(ctx, g.Key(c.Resource)); err != nil || !known {
			if err != nil {
				return err
			}
			continue
		}
		_, known, err := g.look(ctx, g.TermsKey()) // somebody may have set them since
		if err == nil && !known {
			err = fencing.ErrTermsLost
		}
		return err
	}
	return nil
}

func digits(n uint64) string { return strconv.FormatUint(n, 10) }

// refused returns why the script did not admit the claims. Old: it was told terms that are not those of now.
func refused(claims []fencing.Claim, answer []any) (_ error, old bool) {
	if len(answer) != 8 {
		return fmt.Errorf("the server answers %q, which no guard wrote", answer), false
	}
	var number [5]uint64
	for i, at := range []int{2, 4, 5, 6, 7} {
		text, _ := answer[at].(string)
		var err error
		if number[i], err = strconv.ParseUint(text, 10, 63); err != nil {
			return fmt.Errorf("the server answers %q, which no guard wrote", answer), false
		}
	}
	space, _ := answer[3].(string)
	which, _ := answer[1].(int64)
	terms := fencing.Terms{Epoch: number[0], Space: space, Floor: fencing.Token(number[1])}
	seen := fencing.Seen{Epoch: number[2], Token: fencing.Token(number[3]), Sequence: number[4]}
	if seen.Epoch > terms.Epoch {
		return errors.New("the resource was seen in a later epoch than that of the terms, which were lost or restored"),
			true
	}
	if _, err := fencing.Judge(claims[max(0, min(int(which), len(claims))-1)], terms, seen); err != nil {
		return err, false
	}
	return fmt.Errorf("the server refused %v, and %+v, %+v do not say why", claims, terms, seen), false
}
