package replica

import (
	"encoding/binary"
	"errors"
)

// The first byte of a log entry is its kind. The term in which it was decided follows, then the rest.
const (
	entryBatch byte = 1 // commands of the lock state machine
	entryFact  byte = 2 // a fact about the cluster
)

// beginEntry begins a log entry that a leader decides in term.
//
// Raft takes an entry from the member that leads when the entry comes. That may be the same member in a later term,
// after another one has led: a goroutine that stood still for two hand-overs is enough. The earlier leader's
// decisions by its clock (a session is over), by its connections (a command comes from the connection to which the
// session is attached) or by its state (a minimum time goes on) are out of date. So no replica carries out an entry
// that lands in another term.
func beginEntry(kind byte, term uint64) []byte {
	return binary.AppendUvarint([]byte{kind}, term)
}

// readEntry returns the parts of a log entry.
func readEntry(data []byte) (kind byte, term uint64, body []byte, err error) {
	if len(data) == 0 {
		return 0, 0, nil, errors.New("it is empty")
	}
	term, n := binary.Uvarint(data[1:])
	if n <= 0 {
		return 0, 0, nil, errors.New("it has no term")
	}
	return data[0], term, data[1+n:], nil
}
