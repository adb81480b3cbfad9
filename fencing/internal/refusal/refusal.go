// Package refusal is the flat form of a guard's errors, in which they cross a network.
package refusal

import (
	"errors"

	"github.com/fencelock/fencelock/fencing"
)

// Kind names one of the reasons to refuse.
type Kind string

// The kinds, one for each error type of package fencing.
const (
	Stale        Kind = "stale-token"
	NoToken      Kind = "no-token"
	NotExclusive Kind = "not-exclusive"
	Space        Kind = "another-space"
	Hold         Kind = "another-hold"
	Repeated     Kind = "repeated-write"
	Reordered    Kind = "reordered-write"
)

// Refusal is one error of a guard.
type Refusal struct {
	Kind     Kind
	Title    string // the kind in words
	Resource string
	Token    fencing.Token
	Highest  fencing.Token
	Space    string // with the kind Space, as Want
	Want     string
	Sequence uint64 // with the kinds Repeated and Reordered, as Last
	Last     uint64
	Mixed    []string // with the kind Reordered

	Generation        fencing.Generation // with the kinds Stale and Space, as HighestGeneration
	HighestGeneration fencing.Generation
	Nonce             fencing.Nonce // with the kind Hold, as WantNonce
	WantNonce         fencing.Nonce
}

// Of returns the refusal in err's chain, if there is one.
func Of(err error) (Refusal, bool) {
	var (
		stale *fencing.StaleError
		none  *fencing.NoTokenError
		share *fencing.NotExclusiveError
		space *fencing.SpaceError
		hold  *fencing.HoldError
		order *fencing.SequenceError
	)
	switch {
	case errors.As(err, &stale):
		return Refusal{
			Kind: Stale, Title: "Stale fencing token", Resource: stale.Resource,
			Token: stale.Token, Highest: stale.Highest,
			Generation: stale.Generation, HighestGeneration: stale.HighestGeneration,
		}, true
	case errors.As(err, &none):
		return Refusal{Kind: NoToken, Title: "No fencing token", Resource: none.Resource, Highest: none.Highest}, true
	case errors.As(err, &share):
		return Refusal{
			Kind: NotExclusive, Title: "Fencing token of a hold that is not exclusive",
			Resource: share.Resource, Token: share.Token, Highest: share.Highest,
		}, true
	case errors.As(err, &space):
		return Refusal{
			Kind: Space, Title: "Fencing token of another space",
			Resource: space.Resource, Token: space.Token, Highest: space.Highest, Space: space.Space, Want: space.Want,
			Generation: space.Generation, HighestGeneration: space.WantGeneration,
		}, true
	case errors.As(err, &hold):
		return Refusal{
			Kind: Hold, Title: "Fencing token of another hold",
			Resource: hold.Resource, Token: hold.Token, Highest: hold.Token, Nonce: hold.Nonce, WantNonce: hold.Want,
		}, true
	case errors.As(err, &order):
		r := Refusal{
			Kind: Reordered, Title: "Reordered write", Resource: order.Resource,
			Token: order.Token, Highest: order.Token, Sequence: order.Sequence, Last: order.Last,
			Mixed: order.Mixed,
		}
		if errors.Is(err, fencing.ErrRepeated) {
			r.Kind, r.Title = Repeated, "Repeated write"
		}
		return r, true
	}
	return Refusal{}, false
}

// ReadHold sets the generations and nonces from their texts. A text that cannot be read is left out: it only explains.
func (r *Refusal) ReadHold(generation, highest, nonce, want string) {
	r.Generation, _ = fencing.ParseGeneration(generation)
	r.HighestGeneration, _ = fencing.ParseGeneration(highest)
	r.Nonce, _ = fencing.ParseNonce(nonce)
	r.WantNonce, _ = fencing.ParseNonce(want)
}

// Err returns the error that Of was given, or nil for an unknown kind.
func (r Refusal) Err() error {
	switch r.Kind {
	case Stale:
		return &fencing.StaleError{
			Resource: r.Resource, Token: r.Token, Highest: r.Highest,
			Generation: r.Generation, HighestGeneration: r.HighestGeneration,
		}
	case NoToken:
		return &fencing.NoTokenError{Resource: r.Resource, Highest: r.Highest}
	case NotExclusive:
		return &fencing.NotExclusiveError{Resource: r.Resource, Token: r.Token, Highest: r.Highest}
	case Space:
		return &fencing.SpaceError{
			Resource: r.Resource, Token: r.Token, Highest: r.Highest, Space: r.Space, Want: r.Want,
			Generation: r.Generation, WantGeneration: r.HighestGeneration,
		}
	case Hold:
		return &fencing.HoldError{Resource: r.Resource, Token: r.Token, Nonce: r.Nonce, Want: r.WantNonce}
	case Repeated, Reordered:
		return &fencing.SequenceError{
			Resource: r.Resource, Token: r.Token, Sequence: r.Sequence, Last: r.Last, Mixed: r.Mixed,
		}
	}
	return nil
}
