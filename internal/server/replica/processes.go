package replica

// The process of a member that counts. With a copied data directory, or a host name that moves to another machine,
// there can be two processes of one member, and neither has all entries that the two have acknowledged. So each start
// of a member has a number, one more than the previous start in its data directory, and a random name. Connections for
// raft name the starts at both ends, and the log records, for each member, the start that counts.
//
//	an earlier start than the recorded one     is turned away wherever it dials or is dialled, and stops
//	a later one, while there is a leader       counts once a majority has committed its record without it, which the
//	                                           leader proposes if the process of before does not answer
//	a later one, while there is no leader      may vote and acknowledge, so that a cluster always restarts; the next
//	                                           leader records it
//
// The record is committed twice before the leader admits the process: a member that stores the second record has
// applied the first. So a member that might still count the vote of the earlier process cannot be elected.
//
// On a connection, each side also sends the known end of the other's log. A member with a shorter log went back in time
// while it ran, like a virtual machine that is reverted to a snapshot, and stops.

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

// levelStarts is the lowest feature level at which connections for raft name starts.
const levelStarts = machine.LevelHiddenIDs

// startsFile is the file with the number of the last start.
const startsFile = "starts"

// nextStart returns the start of this process, and stores its number in dir, unless dir is empty.
func nextStart(dir string) (string, error) {
	number := uint64(1)
	if dir != "" {
		path := filepath.Join(dir, startsFile)
		text, err := os.ReadFile(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return "", err
		default:
			before, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 63)
			if err != nil {
				return "", &CorruptError{File: path, Why: err.Error()}
			}
			number = before + 1
		}
		if err := keepNumber(dir, number); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%d-%s", number, newStart()), nil
}

// keepNumber stores the number of the last start. After a refused start the caller stores the previous number, so that
// the next start has the same number.
func keepNumber(dir string, number uint64) error {
	if dir == "" {
		return nil
	}
	return writeFile(filepath.Join(dir, startsFile), fmt.Appendln(nil, number))
}

// numberOf returns the number of a start; zero for "" and for the start of an earlier version.
func numberOf(start string) uint64 {
	digits, _, _ := strings.Cut(start, "-")
	number, _ := strconv.ParseUint(digits, 10, 63) // zero on an error
	return number
}

// mayCount reports whether a start is the recorded start or a later start. Without a record every start may count.
func mayCount(start, recorded string) bool {
	return recorded == "" || start == recorded || numberOf(start) > numberOf(recorded)
}

// ReplacedError is the reason why a server stops: another process of the same member counts for the other members.
type ReplacedError struct {
	ID         string
	Own, Other string // the starts
}

func (e *ReplacedError) Error() string {
	return fmt.Sprintf("the members go on with another process of this member, %s: start %s, and this is start %s. One of "+
		"the two has a copy of the data of the other, or older data: start this server with an empty data directory", e.ID, e.Other, e.Own)
}

// RevertedError is the reason why a server stops: it lost acknowledged entries while it ran.
type RevertedError struct{ Last, Acknowledged uint64 }

func (e *RevertedError) Error() string {
	return fmt.Sprintf("the log of this member ends with entry %d, and it has acknowledged entries up to %d: it went back "+
		"in time while it ran, as a virtual machine does that is reverted to a snapshot. Start it again", e.Last, e.Acknowledged)
}

// claim is the first message of a process that dials for raft.
type claim struct {
	to, from raft.ServerID
	start    string // the start of the process that dials
	run      run    // the dialled member's process, as the dialler knows it
}

const claimParts = 5

func (c *claim) String() string {
	return strings.Join([]string{
		string(c.to), string(c.from), c.start, c.run.start, strconv.FormatUint(c.run.index, 10),
	}, atSign)
}

func readClaim(text string) (c *claim, err error) {
	parts := strings.Split(text, atSign)
	if len(parts) != claimParts {
		return nil, errors.New("it does not say who it is")
	}
	c = &claim{to: raft.ServerID(parts[0]), from: raft.ServerID(parts[1]), start: parts[2], run: run{start: parts[3]}}
	if c.run.index, err = strconv.ParseUint(parts[4], 10, 64); err == nil && c.String() != text {
		err = errors.New("it does not identify itself as members do")
	}
	return c, err
}

// A verdict is the first byte of the answer to a claim. The start of the answering process follows or, for
// verdictReplaced, the start that counts instead of the dialler's start; then the known end of the log of the dialler's
// process.
const (
	verdictWelcome  = 0
	verdictReplaced = 1
)

func writeVerdict(w io.Writer, verdict byte, start string, known uint64) error {
	head := append([]byte{verdict, byte(len(start))}, start...)
	_, err := w.Write(binary.BigEndian.AppendUint64(head, known))
	return err
}

func readVerdict(r io.Reader) (verdict byte, start string, known uint64, err error) {
	head := make([]byte, 2)
	if _, err := io.ReadFull(r, head); err != nil {
		return 0, "", 0, err
	}
	rest := make([]byte, int(head[1])+8)
	if _, err := io.ReadFull(r, rest); err != nil {
		return 0, "", 0, err
	}
	return head[0], string(rest[:head[1]]), binary.BigEndian.Uint64(rest[head[1]:]), nil
}

// namesStarts reports whether connections for raft name starts, which all members then support.
func (r *Replica) namesStarts() bool { return r.State.Machine.Level() >= levelStarts }

// claimTo returns this member's claim to a member that it dials.
func (r *Replica) claimTo(id raft.ServerID) *claim {
	return &claim{to: id, from: r.id, start: r.start, run: r.stores.known.runOf(id)}
}

// meet checks the claim of a member that dials for raft, and answers it.
func (r *Replica) meet(conn net.Conn, c *claim) error {
	if c.run.start == r.start {
		if err := r.reverted(c.run.index); err != nil {
			return err
		}
	}
	verdict, start := byte(verdictWelcome), r.start
	recorded := r.State.Started(c.from)
	if !mayCount(c.start, recorded) {
		verdict, start = verdictReplaced, recorded
	} else if other := r.peers.refused(c.from, c.start); other != "" {
		verdict, start = verdictReplaced, other
	} else if _, leads := r.LeadingTerm(); leads {
		_ = r.peers.judge(c.from, c.start, recorded, r.proof.mark()) // until it counts, it may ask for votes but gets none
	}
	index := uint64(0)
	if run := r.stores.known.runOf(c.from); run.start == c.start {
		index = run.index
	}
	err := writeVerdict(conn, verdict, start, index)
	if verdict == verdictReplaced {
		return errors.Join(err, &ReplacedError{string(c.from), c.start, start})
	}
	return errors.Join(err, r.name(conn, c.from, c.start, false))
}

// greet reads the answer of a member that this member has dialled for raft. It returns an error if its process does not
// count. If this process does not count, or has lost entries, this member stops.
func (r *Replica) greet(conn net.Conn, id raft.ServerID) error {
	verdict, start, known, err := readVerdict(conn)
	if err != nil {
		return err
	}
	if verdict == verdictReplaced {
		err := &ReplacedError{string(r.id), r.start, start}
		r.config.Fatal(err)
		return err
	}
	if err := r.reverted(known); err != nil {
		return err
	}
	recorded := r.State.Started(id)
	if !mayCount(start, recorded) {
		return &ReplacedError{string(id), start, recorded}
	}
	_, leads := r.LeadingTerm()
	if !leads {
		r.peers.drop(id, func(t *trackedConn) bool { return t.start != start })
	} else if err := r.peers.judge(id, start, recorded, r.proof.mark()); err != nil {
		return err
	}
	return r.name(conn, id, start, true)
}

// name records the process at the other end of a connection for raft. It returns an error if another process has been
// recorded meanwhile: replaced closes only connections with a name.
func (r *Replica) name(conn net.Conn, id raft.ServerID, start string, dialled bool) error {
	r.peers.name(conn, id, start, dialled)
	if recorded := r.State.Started(id); !mayCount(start, recorded) {
		return &ReplacedError{string(id), start, recorded}
	}
	return nil
}

// reverted stops this member and returns an error if its log ends before known, an entry that it has acknowledged.
func (r *Replica) reverted(known uint64) error {
	last := r.raft.LastIndex()
	if known <= last {
		return nil
	}
	err := &RevertedError{Last: last, Acknowledged: known}
	r.config.Fatal(err)
	return err
}

// reconnect closes the connections that this member has dialled to another member. The next connection sends the known
// end of the log to that member, which has lost entries.
func (r *Replica) reconnect(id raft.ServerID) {
	if r.peers != nil {
		r.noteKnown()
		r.peers.drop(id, func(c *trackedConn) bool { return c.dialled })
	}
}

// replaced handles the record of a start.
func (r *Replica) replaced(id raft.ServerID, recorded string) {
	if r.peers == nil {
		return
	}
	r.peers.serving.Go(func() { // closing a connection may take some time
		r.peers.drop(id, func(t *trackedConn) bool { return t.start != "" && !mayCount(t.start, recorded) })
	})
	if id == r.id && !mayCount(r.start, recorded) {
		r.config.Fatal(&ReplacedError{string(id), r.start, recorded})
	}
}

// newcomer is a process that waits until its record is committed, or that is refused because another process answers.
type newcomer struct {
	start   string
	mark    uint64 // the earlier process lives if it acknowledges a request after the mark
	since   time.Time
	refused string // the start that counts instead; empty: it waits
	writing bool   // its record is being written
}

// name records the process at the other end of a connection for raft.
func (p *peerNet) name(conn net.Conn, id raft.ServerID, start string, dialled bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t, ok := conn.(*trackedConn); ok { // always
		t.member, t.start, t.dialled = id, start, dialled
	}
}

// drop closes the connections for raft with a member for which the function which returns true.
func (p *peerNet) drop(id raft.ServerID, which func(*trackedConn) bool) {
	var over []*trackedConn
	p.mu.Lock()
	for t := range p.conns {
		if t.member == id && which(t) {
			over = append(over, t)
		}
	}
	p.mu.Unlock()
	for _, t := range over {
		_ = t.Close() // it is over
	}
}

// speaksTo returns the start of the process of a member to which this member has dialled connections for raft, or "".
// The caller holds p.mu.
func (p *peerNet) speaksTo(id raft.ServerID) string {
	for t := range p.conns {
		if t.dialled && t.member == id && t.start != "" {
			return t.start
		}
	}
	return ""
}

// startOf returns the start of the process of a member that has connections for raft with this process, or "".
func (p *peerNet) startOf(id raft.ServerID) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for t := range p.conns {
		if t.member == id && t.start != "" {
			return t.start
		}
	}
	return ""
}

// judge returns nil if a process of a member counts for this leader. Otherwise it makes the process a newcomer and
// returns an error.
func (p *peerNet) judge(id raft.ServerID, start, recorded string, mark uint64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	other := p.speaksTo(id)
	n := p.newcomers[id]
	switch {
	case other == start, other == "" && recorded == "":
		return nil
	case other == "" && start == recorded && (n == nil || !n.writing):
		return nil
	case n == nil || n.start != start:
		p.newcomers[id] = &newcomer{start: start, mark: mark, since: time.Now()}
		p.came.Notify()
	}
	return fmt.Errorf("start %s of member %s has not been recorded yet", start, id)
}

// refused returns the start that counts instead of a refused start; empty if start was not refused.
func (p *peerNet) refused(id raft.ServerID, start string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := p.newcomers[id]; n != nil && n.start == start {
		return n.refused
	}
	return ""
}

// recordEvery is the maximum interval at which a leader checks for starts to record.
const recordEvery = 100 * time.Millisecond

// recordStarts records the starts of the members until ctx ends.
func (t *Term) recordStarts(ctx context.Context) {
	r := t.replica
	if r.peers == nil {
		return
	}
	r.peers.expectNewcomers()
	tick := time.NewTicker(recordEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-r.peers.came:
		case <-ctx.Done():
			return
		}
		if !r.namesStarts() {
			continue
		}
		for _, m := range r.servers() {
			if m.ID == r.id {
				continue
			}
			if err := t.recordStart(m.ID); err != nil && ctx.Err() == nil {
				r.config.Log.Debug("a start was not recorded", "id", m.ID, "error", err)
			}
		}
	}
}

// recordStart records the start of a member, or decides about a waiting process of it.
func (t *Term) recordStart(id raft.ServerID) error {
	r, p := t.replica, t.replica.peers
	p.mu.Lock()
	speaks, n := p.speaksTo(id), p.newcomers[id]
	p.mu.Unlock()
	if n == nil || n.refused != "" {
		if speaks == "" || speaks == r.State.Started(id) {
			return nil
		}
		return t.tryTell(fact{Started: id, Start: speaks})
	}
	if speaks != "" {
		lives, gone := r.answersAs(id, speaks)
		switch {
		case lives || !gone && r.proof.heardOf(id, t.number, n.mark):
			p.turnAway(id, n, speaks)
			r.config.Log.Error("another process of a member was refused: the data of one of the two is a copy",
				"id", id, "counts", speaks, "turned away", n.start)
			return nil
		case !gone && time.Since(n.since) < r.config.Timing.WithDefaults().Heartbeat:
			return nil // the earlier process may still answer
		}
	}
	return t.letIn(id, n)
}

// answersAs asks at the addresses of the connections with a member. lives reports that the process with the start
// answers; gone, that it certainly does not run there.
func (r *Replica) answersAs(id raft.ServerID, start string) (lives, gone bool) {
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(r.config.AskTime, startTimeout)/2)
	defer cancel()
	gone = true
	for _, place := range r.peers.placesOf(id) {
		a, err := r.peers.ask(ctx, place, question{Who: true})
		switch {
		case err != nil:
			gone = gone && errors.Is(err, syscall.ECONNREFUSED)
		case a.ID == id && a.Start == start:
			return true, false
		}
	}
	return false, gone
}

// letIn makes a process count, instead of a process that does not answer.
func (t *Term) letIn(id raft.ServerID, n *newcomer) error {
	r, p := t.replica, t.replica.peers
	p.mu.Lock()
	n.writing = true
	p.mu.Unlock()
	p.drop(id, func(c *trackedConn) bool { return c.start != n.start })
	f := fact{Started: id, Start: n.start}
	err := t.tryTell(f)
	if err == nil {
		err = t.tryTell(f) // a member that stores this record has applied the first
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n.writing = false
	if err == nil && p.newcomers[id] == n {
		delete(p.newcomers, id)
	}
	if err == nil && r.State.Started(id) != n.start {
		return fmt.Errorf("member %s has a later start than %s", id, n.start)
	}
	return err
}

// turnAway refuses a process because another one answers, and closes its connections: it gets the refusal when it dials
// again.
func (p *peerNet) turnAway(id raft.ServerID, n *newcomer, counts string) {
	p.mu.Lock()
	n.refused = counts
	p.mu.Unlock()
	p.drop(id, func(c *trackedConn) bool { return c.start == n.start })
}

// expectNewcomers removes the newcomers of an earlier term, at the beginning of a term in which this member leads.
func (p *peerNet) expectNewcomers() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.newcomers)
}

// placesOf returns the remote addresses of the connections for raft that this member has dialled to a member.
func (p *peerNet) placesOf(id raft.ServerID) (all []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for t := range p.conns {
		if t.dialled && t.member == id {
			all = append(all, t.RemoteAddr().String())
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
