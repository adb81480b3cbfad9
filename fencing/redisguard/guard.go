package redisguard

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Prefix is in front of the guard's keys. Default "fencing:".
	Prefix string

	// ID is the expected ID of the guard's memory (fencing.Terms.ID): another ID is fencing.ErrGuardID. Zero: the ID that
	// this Guard sees first, so that keys that were deleted and recreated before that are not detected.
	ID fencing.Nonce
}

// Guard guards the resources of one Redis. It is safe for concurrent use.
type Guard struct {
	client  redis.UniversalClient
	prefix  string
	cluster bool // the terms are in a separate slot
	memory  *memory.Pin
}

var (
	_ fencing.Guard  = (*Guard)(nil)
	_ fencing.Keeper = (*Guard)(nil)
)

// New returns a guard that uses the client, any of go-redis. It does no I/O: Create comes before the first check. The
// error is a *fencing.InvalidError that names the invalid argument.
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
	g := &Guard{client: client, prefix: o.Prefix, memory: memory.NewPin(o.ID)}
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
	_, err := g.run(ctx, "check", claims, true, checkOnly, nil, nil)
	return err
}

// Do checks the claims and, if they are admitted, writes, in one step of the server. Values that were read before are
// not part of that step: another holder may have written since; see Update. Do returns write's result, as go-redis
// reads it, and nil for a nil. An error of the write, raised or returned, is Do's and no refusal; the tokens are still
// recorded. Where the hold has made the write before (Claim.Sequence), Do returns the result of that write.
func (g *Guard) Do(ctx context.Context, claims fencing.Claims, write *Write, keys []string, args ...any) (any, error) {
	if write == nil {
		return nil, fmt.Errorf("redisguard: do: %w", &fencing.InvalidError{What: "write", Why: "it is nil"})
	}
	return g.run(ctx, "do", claims, false, write, keys, args)
}

// Update shows the claims, reads the value of key, and writes the result of f, if the claims are still admitted and
// the value is unchanged; otherwise it retries, until ctx ends. old is nil if the key does not exist, and a nil result
// deletes the key; an expiry is kept. If f fails, Update returns its error and does not write. f may be called more
// than once, so it must have no side effects.
func (g *Guard) Update(ctx context.Context, claims fencing.Claims, key string,
	f func(old []byte) ([]byte, error)) error {
	if f == nil {
		return fmt.Errorf("redisguard: update: %w", &fencing.InvalidError{What: "function", Why: "it is nil"})
	}
	for {
		answer, err := g.run(ctx, "update", claims, true, get, []string{key}, nil)
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
		_, err = g.run(ctx, "update", claims, false, swap, []string{key}, []any{condition, set})
		var theirs redis.Error
		if !errors.As(err, &theirs) || !strings.HasPrefix(theirs.Error(), changed) {
			return err
		}
	}
}

// run checks the claims and writes. Unordered: it is no write of the hold, and needs no order.
func (g *Guard) run(ctx context.Context, call string, claims fencing.Claims, unordered bool, write *Write, keys []string,
	args []any) (any, error) {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return nil, fmt.Errorf("redisguard: %s: %w", call, err)
	}
	if unordered {
		list = fencing.Unordered(list)
	}
	fail := func(err error) (any, error) {
		return nil, fmt.Errorf("redisguard: %s %q: %w", call, list[0].Resource, err)
	}
	for before := ""; ; {
		if err := ctx.Err(); err != nil {
			return fail(err)
		}
		text, allKeys, allArgs, err := g.arguments(ctx, list)
		if err != nil {
			return fail(err)
		}
		answer, err := write.script.Run(ctx, g.client, append(allKeys, keys...), append(allArgs, args...)...).Slice()
		if err != nil {
			return fail(err)
		}
		if code, _ := answer[0].(int64); code != 0 {
			if len(answer) < 2 {
				return nil, nil
			}
			return answer[1], nil
		}
		err = g.refused(list, answer[1:])
		switch {
		case fencing.Refusal(err):
			return nil, err
		case errors.Is(err, fencing.ErrTermsLost) && g.cluster && text != before:
			before = text // an operator may have changed the terms since they were read
		default:
			return fail(err)
		}
	}
}

// arguments returns the script's arguments for the guard and the claims, and on Redis Cluster the text of the terms.
func (g *Guard) arguments(ctx context.Context, claims []fencing.Claim) (text string, keys []string, args []any, _ error) {
	for _, c := range claims {
		keys = append(keys, g.Key(c.Resource))
	}
	inSlot := "1"
	if !g.cluster {
		keys = append(keys, g.TermsKey())
	}
	if id := g.memory.ID(); g.cluster || id == (fencing.Nonce{}) {
		terms, read, err := g.terms(ctx)
		if err == nil {
			err = g.memory.Check(terms)
		}
		if pinned := terms.Pin(claims[0]); err == nil && g.cluster && pinned != terms {
			if err = change.Run(ctx, g.client, []string{g.TermsKey()}, read, pinned.String()).Err(); err == nil {
				_, read, err = g.terms(ctx)
			}
		}
		if err != nil {
			return "", nil, nil, err
		}
		if g.cluster {
			inSlot, text = "0", read
		}
	}
	args = []any{len(claims), inSlot, text, g.memory.ID().String()}
	for _, c := range claims {
		token := c.Token
		if !token.Exclusive() {
			token = 0 // is refused, and returns the memory
		}
		nonce := c.Nonce.String()
		if nonce == "" {
			nonce = "-"
		}
		args = append(args, digits(uint64(token)), c.Space, digits(c.Sequence), c.Generation.String(), nonce)
	}
	return text, keys, args, nil
}

func digits(n uint64) string { return strconv.FormatUint(n, 10) }

// refused returns why the script did not admit the claims.
func (g *Guard) refused(claims []fencing.Claim, answer []any) error {
	texts := make([]string, len(answer))
	for i := range answer {
		texts[i], _ = answer[i].(string)
	}
	if len(texts) == 0 {
		return errors.New("the server's reply is not that of a guard's script")
	}
	terms, err := parseTerms(texts[0])
	if err == nil {
		err = g.memory.Check(terms)
	}
	if err != nil {
		return err
	}
	next := 0
	_, err = fencing.JudgeAll(claims, terms, func(string) (fencing.Seen, error) {
		if next++; next < len(texts) {
			return parseSeen(texts[next])
		}
		return fencing.Seen{}, errors.New("the server's reply is not that of a guard's script")
	})
	if err == nil {
		err = fmt.Errorf("the server refused %v with the unknown reply %q", claims, texts)
	}
	return err
}
