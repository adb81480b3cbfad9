package replica

import (
	"encoding/binary"
	"errors"
)

// The first byte of a log entry is its kind. The term in which the leader decided it follows, then the body.
const (
	entryBatch byte = 1 // commands of the lock state machine
	entryFact  byte = 2 // a fact about the cluster
)

// beginEntry returns the beginning of a log entry that a leader decides in term.
//
// Raft accepts an entry if the member leads when the entry arrives. That may be a later term of the same member, after
// another member has led, for example if a goroutine stalled for two leadership changes. The decisions of the earlier
// term are then outdated: those by its clock (a session is over), by its connections (a command comes from the
// connection to which the session is attached) and by its state (a minimum hold has not ended). So no replica applies
// an entry that commits in another term.
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
