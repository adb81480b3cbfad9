package replica

// A start counts once the other members had the chance to object. Before a starting member votes and acknowledges
// entries, it asks all other members for objections. It uses the answers that arrive in time:
//
//	another process runs with its node id              it does not start: it is a copy, or the other one is
//	its log ends before an acknowledged entry,         its data is set aside, and it begins as a new member
//	or a later start of it has been recorded
//	neither, or no answer                              it starts, and counts as processes.go says
//
// A member that does not answer does not object: otherwise a cluster could not restart after all members were down. A
// conflict that no answering member knows is detected when two histories meet: see commits.go.

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// startTimeout is the maximum time for which a starting member waits for the others. Each of them spends at most half
// of it to look for another process.
const startTimeout = time.Second

// newStart returns a random name for one process of a member.
func newStart() string {
	var raw [8]byte
	rand.Read(raw[:]) // never fails
	return hex.EncodeToString(raw[:])
}

// starting is the question of a starting member to the other members.
type starting struct {
	ID    raft.ServerID `json:"id"`
	Start string        `json:"start"`
	Peer  string        `json:"peer"`
}

// RunningError is the reason why a server does not start, or is not admitted: another process with its node id runs.
type RunningError struct {
	ID, Address string // the address of the other process
}

func (e *RunningError) Error() string {
	return fmt.Sprintf("a server with the node id %s, which is that of this data directory, runs at %s: one of the two "+
		"has a copy of the data of the other. Stop the other server first, or start this one with an empty data "+
		"directory", e.ID, e.Address)
}

// objections are the combined answers of the other members.
type objections struct {
	runs  string // the address of another process; empty: none
	known uint64 // the known end of this member's log
	later string // the recorded start, if it is later than this start
}

// askBeforeStart asks all other members for objections to this start, unless this member is the only voter or has no
// cluster.
func (r *Replica) askBeforeStart() objections {
	if voters(r.stores.members) == 1 && slices.ContainsFunc(r.stores.members, func(m raft.Server) bool {
		return m.ID == r.id && m.Suffrage == raft.Voter
	}) {
		return objections{}
	}
	var found objections
	if len(r.stores.members) == 0 {
		return found
	}
	addresses := slices.Clone(r.config.Join)
	for _, m := range r.stores.members {
		addresses = append(addresses, string(m.Address))
	}
	slices.Sort(addresses)
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(r.config.AskTime, startTimeout))
	defer cancel()
	var (
		mu  sync.Mutex
		all sync.WaitGroup
	)
	for _, address := range slices.Compact(addresses) {
		if address == r.address {
			continue
		}
		all.Go(func() {
			a, ok := r.askAbout(ctx, address)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case !ok:
			case a.ID == r.id && a.Start != r.start:
				found.runs = address
			default:
				found.known = max(found.known, a.Known)
				if !mayCount(r.start, a.Recorded) {
					found.later = a.Recorded
				}
				if a.Runs != "" {
					found.runs = a.Runs
				}
			}
		})
	}
	all.Wait()
	return found
}

// askAbout asks the member at an address for its objections. If there is a key, the member must prove that it has the
// key.
func (r *Replica) askAbout(ctx context.Context, address string) (a answer, ok bool) {
	a, proven, err := r.askProven(ctx, address, question{Starting: &starting{r.id, r.start, r.address}})
	return a, err == nil && (proven || len(r.config.JoinKey) == 0)
}

// object adds this member's objections to the start of another member.
func (r *Replica) object(a *answer, s *starting, k *known, members []raft.Server) {
	a.Known, a.Recorded = k.of(s.ID), r.State.Started(s.ID)
	places := r.peers.placesOf(s.ID)
	for _, m := range members {
		if m.ID == s.ID {
			places = append(places, string(m.Address))
		}
	}
	slices.Sort(places)
	var asking sync.WaitGroup
	var runs atomic.Pointer[string]
	for _, place := range slices.Compact(places) {
		if place != s.Peer {
			asking.Go(func() {
				if r.runs(place, s.ID, s.Start) {
					runs.Store(&place)
				}
			})
		}
	}
	asking.Wait()
	if at := runs.Load(); at != nil {
		a.Runs = *at
	}
}

// runs reports whether another process of the member, with a start other than start, answers at an address.
func (r *Replica) runs(address string, id raft.ServerID, start string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(r.config.AskTime, startTimeout)/2)
	defer cancel()
	a, err := r.peers.ask(ctx, address, question{Who: true})
	return err == nil && a.ID == id && a.Start != start
}

var errStarting = errors.New("it is being started")

// early returns the function that answers questions while this member starts: it returns the identity of this member,
// and its objections to other starts.
func (r *Replica) early(self member, k *known, members []raft.Server) func(question) answer {
	return func(q question) answer {
		if q.Starting == nil && !q.Who {
			return answer{Error: errStarting.Error()}
		}
		a := answer{member: self}
		r.prove(&a, q)
		if q.Starting != nil {
			r.object(&a, q.Starting, k, members)
		}
		return a
	}
}

// relate adds the cluster of this member to an answer, and a proof that the member knows the key.
func (r *Replica) relate(a *answer, q question) {
	self := r.self()
	a.Relative = &relative{r.State.home(), self}
	if len(r.config.JoinKey) > 0 && len(q.Prove) >= nonceBytes {
		a.Proof = proofOfKey(r.config.JoinKey, q.Prove, self)
	}
}

// prove adds the proof that the question asks for, if there is a key.
func (r *Replica) prove(a *answer, q question) {
	if len(r.config.JoinKey) > 0 && len(q.Prove) >= nonceBytes {
		a.Proof = proofOfKey(r.config.JoinKey, q.Prove, a.member)
	}
}

// forget sets the data of this member aside, so that it starts as a new member. Its log ends before entries that this
// or another process of it has acknowledged, so its vote could elect a member that also lacks these entries.
func (r *Replica) forget(found objections) error {
	c, last := &r.config, r.stores.last
	if len(c.Join) == 0 {
		return fmt.Errorf("the data in %s is older than this member was, or a copy: its log ends with entry %d, it has "+
			"acknowledged entries up to %d, this is its start %s, and start %q has counted. Start it with an empty directory "+
			"and the addresses of the others", c.DataDir, last, found.known, r.start, found.later)
	}
	before, lock := r.id, r.stores.open[0]
	r.stores.open = r.stores.open[1:]
	if err := r.stores.close(); err != nil {
		return errors.Join(err, lock.Close())
	}
	aside, err := setAside(c.DataDir)
	if err = errors.Join(err, lock.Close()); err != nil {
		return fmt.Errorf("setting the data in %s aside: %w", c.DataDir, err)
	}
	c.Log.Error("the data of this member was reverted or is a copy: it starts as a new member",
		"last", last, "acknowledged", found.known, "later start", found.later, "node id before", before,
		"data set aside in", aside)
	return r.openStores()
}

// asideName begins the name of a folder in a data directory that contains the earlier content of the directory.
// asideFile is a file with the name of the folder during the move.
const (
	asideName = "set-aside-"
	asideFile = "setting-aside"
)

// setAside moves the content of a data directory into a folder in it. The caller has the lock of the directory.
func setAside(dir string) (aside string, err error) {
	aside = filepath.Join(dir, asideName+time.Now().UTC().Format("20060102-150405.000"))
	if err := writeFile(filepath.Join(dir, asideFile), []byte(filepath.Base(aside)+"\n")); err != nil {
		return "", err
	}
	return aside, finishAside(dir)
}

// finishAside completes an interrupted setAside.
func finishAside(dir string) error {
	mark := filepath.Join(dir, asideFile)
	text, err := os.ReadFile(mark)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	name := strings.TrimSpace(string(text))
	if err != nil || !strings.HasPrefix(name, asideName) || filepath.Base(name) != name {
		return errors.Join(fmt.Errorf("%s names no folder", mark), err)
	}
	aside := filepath.Join(dir, name)
	if err := os.MkdirAll(aside, 0o700); err != nil {
		return err
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		if f.Name() == "lock" || f.Name() == asideFile || strings.HasPrefix(f.Name(), asideName) {
			continue
		}
		if err := os.Rename(filepath.Join(dir, f.Name()), filepath.Join(aside, f.Name())); err != nil {
			return err
		}
	}
	if err := errors.Join(syncDir(aside), syncDir(dir)); err != nil {
		return err
	}
	return errors.Join(os.Remove(mark), syncDir(dir))
}
