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
}

// Of returns the refusal in err's chain, if there is one.
func Of(err error) (Refusal, bool) {
	var (
		stale *fencing.StaleError
		none  *fencing.NoTokenError
		share *fencing.NotExclusiveError
		space *fencing.SpaceError
		order *fencing.SequenceError
	)
	switch {
	case errors.As(err, &stale):
		return Refusal{
			Kind: Stale, Title: "Stale fencing token", Resource: stale.Resource,
			Token: stale.Token, Highest: stale.Highest,
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
		}, true
	case errors.As(err, &order):
		r := Refusal{
			Kind: Reordered, Title: "Reordered write", Resource: order.Resource,
			Token: order.Token, Highest: order.Token, Sequence: order.Sequence, Last: order.Last,
		}
		if errors.Is(err, fencing.ErrRepeated) {
			r.Kind, r.Title = Repeated, "Repeated write"
		}
		return r, true
	}
	return Refusal{}, false
}

// Err returns the error that Of was given, or nil for a kind that is not known.
func (r Refusal) Err() error {
	switch r.Kind {
	case Stale:
		return &fencing.StaleError{Resource: r.Resource, Token: r.Token, Highest: r.Highest}
	case NoToken:
		return &fencing.NoTokenError{Resource: r.Resource, Highest: r.Highest}
	case NotExclusive:
		return &fencing.NotExclusiveError{Resource: r.Resource, Token: r.Token, Highest: r.Highest}
	case Space:
		return &fencing.SpaceError{
			Resource: r.Resource, Token: r.Token, Highest: r.Highest, Space: r.Space, Want: r.Want,
		}
	case Repeated, Reordered:
		return &fencing.SequenceError{Resource: r.Resource, Token: r.Token, Sequence: r.Sequence, Last: r.Last}
	}
	return nil
}
