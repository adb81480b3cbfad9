package fencing

// The rule that all guards share. It is a function of what is remembered and what is shown, without any store, so that
// each guard only has to read, call it and write in one atomic step; a guard whose store decides by itself uses it to
// name the reason of a refusal.

import "errors"

// Terms is what a guard remembers as a whole, beside what it remembers of each resource. The first claim sets them;
// later only an operator does (Keeper). They are a value of their own, because an operator has to be able to forget all
// tokens, or to raise them all, without visiting every resource.
type Terms struct {
	// Epoch counts how often an operator made the guard begin anew. What was seen in an earlier epoch is forgotten.
	Epoch uint64
	// Space is the only one whose tokens are admitted. Empty: the first claim did not tell one, and none is compared.
	Space string
	// Floor is the smallest token that is admitted, whatever was seen.
	Floor Token
}

// Seen is what a guard remembers of one resource. The zero value stands for a resource that it does not know. It only
// grows: token within an epoch, sequence within a token.
type Seen struct {
	Epoch uint64
	// Token is the highest one admitted.
	Token Token
	// Sequence is the last one admitted with that token; zero if none had one.
	Sequence uint64
}

// First returns the terms that the first claim of all sets: its space is trusted from then on, until an operator
// accepts another one. A first claim without a space sets none, and none is compared.
func First(c Claim) Terms { return Terms{Space: c.Space} }

// Judge is the rule that all guards share. It returns what to remember of the claim's resource if the guard admits the
// claim, and otherwise the error that says why not. The claim has to be valid, see Claim.Validate.
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
// An exclusive token of another space than the guard's is a *SpaceError, whatever its number: tokens of two spaces do
// not compare.
//
// Judging, and remembering what was admitted, must be one atomic step of the store: Judge is for guards that hold a
// lock on what they remember, or translate what the store has decided.
func Judge(c Claim, t Terms, seen Seen) (Seen, error) {
	if seen.Epoch < t.Epoch {
		seen = Seen{Epoch: t.Epoch}
	}
	highest := max(seen.Token, t.Floor)
	switch {
	case !c.Token.Valid():
		return seen, &NoTokenError{Resource: c.Resource, Highest: highest}
	case !c.Token.Exclusive():
		return seen, &NotExclusiveError{Resource: c.Resource, Token: c.Token, Highest: highest}
	case t.Space != "" && c.Space != t.Space:
		return seen, &SpaceError{Resource: c.Resource, Token: c.Token, Highest: highest, Space: c.Space, Want: t.Space}
	case c.Token < highest:
		return seen, &StaleError{Resource: c.Resource, Token: c.Token, Highest: highest}
	case c.Token > seen.Token:
		return Seen{Epoch: t.Epoch, Token: c.Token, Sequence: c.Sequence}, nil
	case c.Sequence == 0:
		return seen, nil
	case c.Sequence <= seen.Sequence:
		return seen, &SequenceError{Resource: c.Resource, Token: c.Token, Sequence: c.Sequence, Last: seen.Sequence}
	}
	seen.Sequence = c.Sequence
	return seen, nil
}

// JudgeAll is Judge for the claims of one write, in the order of Sorted. Recall answers what is remembered of a
// resource; an error of it ends the judging and is returned as it is. JudgeAll returns what to remember of each, if all
// are admitted, and else a refusal, and nothing to remember: all are admitted or none is.
//
// ErrRepeated is returned only if nothing else refuses: the write was made before, and its caller may answer success.
func JudgeAll(claims []Claim, t Terms, recall func(resource string) (Seen, error)) ([]Seen, error) {
	remember := make([]Seen, len(claims))
	var repeated error
	for i, c := range claims {
		seen, err := recall(c.Resource)
		if err != nil {
			return nil, err
		}
		if remember[i], err = Judge(c, t, seen); errors.Is(err, ErrRepeated) {
			repeated = err
		} else if err != nil {
			return nil, err
		}
	}
	return remember, repeated
}
