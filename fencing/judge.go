package fencing

// The rule that all guards share. It is a function of the memory and the claims, without a store, so that each guard
// only has to read, call it and write in one atomic step; a guard with a store that decides on its side uses it to
// name the reason of a refusal.

import "errors"

// Terms is the part of a guard's memory that applies to all resources. Create writes the terms, and the first claim
// sets the space; later only an operator changes them (Keeper). They are stored separately, so that an operator can
// forget all tokens, or raise them all, without visiting every resource.
type Terms struct {
	// ID is random, and drawn when the guard's memory was created: a store that was dropped and recreated has
	// another one. Zero for a Memory, which lives no longer than the process.
	ID Nonce
	// Epoch counts the times that an operator has reset the guard. Claims seen in an earlier epoch are forgotten.
	Epoch uint64
	// Pinned: the first claim, or an operator, has set Space.
	Pinned bool
	// Space is the only token space that the guard admits. Empty: the first claim had no space, and spaces are not
	// compared.
	Space string
	// Floor is the smallest admitted token, whatever was seen.
	Floor Token
}

// Seen is a guard's memory of one resource. The zero value is an unknown resource. Its values only grow: generation
// within an epoch, token within a generation, sequence within a token.
type Seen struct {
	Epoch uint64
	// Generation and Token are from the highest claim admitted: generations compare first, then tokens.
	Generation Generation
	Token      Token
	// Nonce is that of the hold with this token; zero if no claim named one.
	Nonce Nonce
	// Sequence is from the last write with that token that had one; zero without such a write.
	Sequence uint64
}

// NewTerms returns the terms of a memory that was created now, with a random ID.
func NewTerms() Terms { return Terms{ID: NewNonce()} }

// Pin returns the terms after a claim is admitted: the first claim sets the space, which is trusted from then on,
// until an operator accepts another space. If the first claim has no space, spaces are not compared.
func (t Terms) Pin(c Claim) Terms {
	if !t.Pinned && t.Space == "" {
		t.Pinned, t.Space = true, c.Space
	}
	return t
}

// Judge is the rule that all guards share. It returns the new memory of the claim's resource if the guard admits the
// claim, and otherwise the refusal. The claim has to be valid, see Claim.Validate.
//
//	token   highest   sequence, last     answer
//	0                                    *NoTokenError
//	marked                               *NotExclusiveError
//	33      34                           *StaleError
//	34      33        any                admitted; 34 and the sequence are remembered
//	33      33        0                  admitted
//	33      33        7, last 6          admitted; 7 is remembered
//	33      33        6, last 6          *SequenceError, ErrRepeated: the write is there already
//	33      33        5, last 6          *SequenceError, ErrReordered
//
// This applies within one generation of the lock service. A claim of a later generation than seen is admitted with any
// token; a claim of an earlier generation is a *StaleError. A claim without a generation has generation 0. An equal
// token with another nonce is another hold: *HoldError. The nonce is remembered from the first claim that has it;
// from then on a claim without a nonce is a *HoldError as well.
//
// An exclusive token of another space than the guard's is a *SpaceError, with any number: tokens of two spaces do
// not compare. Neither do tokens of two generations with one number, which come from two independent restores.
//
// ErrTermsLost is returned if the resource was seen in a later epoch than that of the terms.
//
// Judging and remembering must be one atomic step of the store: Judge is for guards that hold a lock on their memory,
// or translate the store's decision.
func Judge(c Claim, t Terms, seen Seen) (Seen, error) {
	if seen.Epoch < t.Epoch {
		seen = Seen{Epoch: t.Epoch}
	}
	t = t.Pin(c)
	order, ordered := c.Generation.Compare(seen.Generation)
	stale := &StaleError{
		Resource: c.Resource, Token: c.Token, Highest: max(seen.Token, t.Floor),
		Generation: c.Generation, HighestGeneration: seen.Generation,
	}
	switch {
	case seen.Epoch > t.Epoch:
		return seen, ErrTermsLost
	case !c.Token.Valid():
		return seen, &NoTokenError{Resource: c.Resource, Highest: stale.Highest}
	case !c.Token.Exclusive():
		return seen, &NotExclusiveError{Resource: c.Resource, Token: c.Token, Highest: stale.Highest}
	case t.Space != "" && c.Space != t.Space || !ordered:
		return seen, &SpaceError{
			Resource: c.Resource, Token: c.Token, Highest: stale.Highest, Space: c.Space, Want: t.Space,
			Generation: c.Generation, WantGeneration: seen.Generation,
		}
	case c.Token < t.Floor || order < 0 || order == 0 && c.Token < seen.Token:
		return seen, stale
	case order > 0 || c.Token > seen.Token:
		return Seen{
			Epoch: t.Epoch, Generation: c.Generation, Token: c.Token, Nonce: c.Nonce, Sequence: c.Sequence,
		}, nil
	case seen.Nonce != Nonce{} && c.Nonce != seen.Nonce:
		return seen, &HoldError{Resource: c.Resource, Token: c.Token, Nonce: c.Nonce, Want: seen.Nonce}
	case c.Sequence != 0 && c.Sequence <= seen.Sequence:
		return seen, &SequenceError{Resource: c.Resource, Token: c.Token, Sequence: c.Sequence, Last: seen.Sequence}
	}
	seen.Nonce = c.Nonce
	seen.Sequence = max(seen.Sequence, c.Sequence)
	return seen, nil
}

// JudgeAll is Judge for the claims of one write, in the order of Sorted. Recall returns the memory of a resource;
// JudgeAll stops at its first error and returns it unchanged. If all claims are admitted JudgeAll returns the new
// memory of each resource, and otherwise a refusal and no memory.
//
// ErrRepeated is returned only if there is no other refusal and every claim with a sequence is repeated: the write
// was made before, and its caller may report success. If only some are repeated, the set is another write than the
// earlier one: the error is ErrReordered, and names the repeated claims. Claims without a sequence do not count.
func JudgeAll(claims []Claim, t Terms, recall func(resource string) (Seen, error)) ([]Seen, error) {
	remember := make([]Seen, len(claims))
	if len(claims) > 0 {
		t = t.Pin(claims[0])
	}
	var repeated []*SequenceError
	news := false
	for i, c := range claims {
		seen, err := recall(c.Resource)
		if err != nil {
			return nil, err
		}
		remember[i], err = Judge(c, t, seen)
		var again *SequenceError
		switch {
		case errors.Is(err, ErrRepeated) && errors.As(err, &again):
			repeated = append(repeated, again)
		case err != nil:
			return nil, err
		case c.Sequence != 0:
			news = true
		}
	}
	if len(repeated) == 0 {
		return remember, nil
	}
	first := repeated[0]
	if news {
		for _, each := range repeated {
			first.Mixed = append(first.Mixed, each.Resource)
		}
	}
	return nil, first
}
