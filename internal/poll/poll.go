// Package poll follows a name of a service that has no watch: it looks, and compares with the look before.
package poll

import (
	"context"
	"iter"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// every is the mean time between two looks.
const every = time.Second

// Watcher implements backend.Watcher over looks. It has no replay: it begins with the first look, changes have no
// revision, their time is that of the look, and a hold that begins and ends between two looks is missed. How a hold
// ended is not known: its end is backend.ChangeReleased.
type Watcher struct {
	backend.Inspector
	// Began is called after the first look of each watch: changes from then on are reported. It may be nil.
	Began func()
}

// holdKey identifies a hold. A driver may know no nonce or no token.
type holdKey struct {
	nonce, id string
	token     uint64
}

func keyOf(h *backend.Holder) holdKey { return holdKey{h.Nonce.String(), h.HoldID, uint64(h.Token)} }

// Watch implements backend.Watcher; since is ignored.
func (w Watcher) Watch(ctx context.Context, name string, _ uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		var before []backend.Holder
		for first := true; ; first = false {
			state, err := w.Look(ctx, name)
			if err != nil {
				yield(backend.Change{}, err)
				return
			}
			if first && w.Began != nil {
				w.Began()
			}
			if !first && !report(name, before, state.Holders, yield) {
				return
			}
			before = state.Holders
			select {
			case <-time.After(every*3/4 + rand.N(every/2)):
			case <-ctx.Done():
				yield(backend.Change{}, ctx.Err())
				return
			}
		}
	}
}

// report yields the ends and the beginnings between two looks, and reports whether the loop continues.
func report(name string, before, now []backend.Holder, yield func(backend.Change, error) bool) bool {
	return missing(before, now, func(h *backend.Holder) bool {
		return yield(change(backend.ChangeReleased, name, h), nil)
	}) && missing(now, before, func(h *backend.Holder) bool {
		return yield(change(backend.ChangeAcquired, name, h), nil)
	})
}

func change(t backend.ChangeType, name string, h *backend.Holder) backend.Change {
	return backend.Change{Type: t, Name: name, Owner: h.Owner, Token: h.Token, Time: time.Now()}
}

// missing calls do for each holder of all that is not in others, until do returns false.
func missing(all, others []backend.Holder, do func(*backend.Holder) bool) bool {
	there := make(map[holdKey]bool, len(others))
	for i := range others {
		there[keyOf(&others[i])] = true
	}
	for i := range all {
		if !there[keyOf(&all[i])] && !do(&all[i]) {
			return false
		}
	}
	return true
}
