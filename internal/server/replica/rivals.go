package replica

// Clusters with the same name: the result of two recoveries, or of a recovery while old members still run. Only the
// generation with the greatest number continues. Two generations with the same number and different ids come from
// recoveries that did not know of each other: neither continues.

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/generation"
	"github.com/fencelock/fencelock/internal/notify"
)

const (
	// rivalTimeout is the maximum time for which a server asks others for their generation, and rivalsEvery is the
	// interval.
	rivalTimeout = time.Second
	rivalsEvery  = 30 * time.Second
	// rivalLinger is the time for which a member that must not serve still answers others before it stops. rivalPause is
	// the minimum time between two rounds that connections of others cause.
	rivalLinger = 2 * time.Second
	rivalPause  = 100 * time.Millisecond
	// maxAhead is the maximum difference by which the number of another generation may be ahead. A greater number is not
	// trusted.
	maxAhead = 1 << 16
)

// RivalError is the reason why a server does not serve, or why a new generation is not created: a member of another
// generation of the same cluster, or of the cluster to replace, answers.
type RivalError struct {
	Address   string // of the other server
	Own       fencing.Generation
	Other     fencing.Generation
	recovered bool // the error comes from Restore or Recover
}

func (e *RivalError) Error() string {
	order, ordered := e.Own.Compare(e.Other)
	switch {
	case e.recovered:
		return fmt.Sprintf("a server of this cluster, of generation %v, answers at %s: stop it for good first, or end its "+
			"generation with --supersede", e.Other, e.Address)
	case !ordered:
		return fmt.Sprintf("the cluster was recovered twice: this server is of generation %v, and the one at %s of "+
			"generation %v. Neither serves: run \"fencelock recover --supersede\" on the one that is to go on, and start the "+
			"other with an empty directory", e.Own, e.Address, e.Other)
	case order < 0:
		return fmt.Sprintf("the cluster goes on as generation %v, at %s; this server is of generation %v: start it with an "+
			"empty directory", e.Other, e.Address, e.Own)
	}
	return fmt.Sprintf("the server at %s is of generation %v, before %v", e.Address, e.Other, e.Own)
}

// relative identifies the answering member and its cluster, even if it belongs to another cluster.
type relative struct {
	Home string `json:"home"`
	// Member is the answering member. answer.Proof is about it.
	Member member `json:"member"`
}

// askRelatives asks the servers at the addresses, and calls found for each server of the cluster that home names. If
// key is not empty, the server must prove that it has the key. It waits for each answer until ctx ends, but at most for
// answerTimeout.
func (p *peerNet) askRelatives(
	ctx context.Context, home string, key []byte, addresses []string, found func(address string, g fencing.Generation),
) {
	var (
		mu  sync.Mutex
		all sync.WaitGroup
	)
	for _, address := range addresses {
		all.Go(func() {
			var q question
			if len(key) > 0 {
				q.Prove = make([]byte, nonceBytes)
				rand.Read(q.Prove) // never fails
			}
			a, _ := p.ask(ctx, address, q) // a server of another home refuses the question, but sends Relative
			who := a.Relative
			if who == nil { // no answer, or an earlier version
				return
			}
			m := member{ID: who.Member.ID, Peer: address}
			if clusterOf(who.Home) != clusterOf(home) || len(key) > 0 && !hmac.Equal(a.Proof, proofOfKey(key, q.Prove, m)) {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			found(address, generation.Of(historyOf(who.Home)))
		})
	}
	all.Wait()
}

// clusterOf returns the part of a home that names the token space.
func clusterOf(home string) string {
	name, _, _ := strings.Cut(home, "/")
	return name
}

// rivals asks the servers from before a restore for their generation. It returns 1 + the greatest number of their
// generations and of own. It returns a *RivalError if a server answers, unless Supersede or NewCluster is set.
func rivals(own BackupInfo, o *RestoreOptions) (number uint64, err error) {
	number = generation.Of(own.History).Number
	home := (&facts{Cluster: own.Cluster, Restored: own.History}).home()
	p := newPeerNet(&Config{TLS: o.TLS, Dial: dialTCP, Log: slog.New(slog.DiscardHandler)}, func() string { return home })
	// There is no hurry when an operator creates a generation: wait for slow servers too.
	p.askRelatives(context.Background(), home, o.JoinKey, o.Members, func(address string, g fencing.Generation) {
		if g.Number > number+maxAhead {
			err = errors.Join(err, fmt.Errorf("the server at %s says that its generation is %v: that cannot be", address, g))
			return
		}
		number = max(number, g.Number)
		if !o.Supersede && !o.NewCluster {
			err = errors.Join(err, &RivalError{address, generation.Of(own.History), g, true})
		}
	})
	return number + 1, err
}

func dialTCP(ctx context.Context, address string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", address)
}

// Rival asks the servers that may belong to another generation of this cluster: at the addresses of the members, in
// Join, and of the members from before a restore. It returns a *RivalError if this server must not serve. Servers that
// do not answer are ignored.
func (r *Replica) Rival(ctx context.Context) error {
	home := r.State.home()
	if r.peers == nil || home == "" {
		return nil
	}
	addresses := slices.Concat(r.contacts(), r.State.former())
	slices.Sort(addresses)
	addresses = slices.DeleteFunc(slices.Compact(addresses), func(a string) bool { return a == r.address })
	own := generation.Of(historyOf(home))
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(r.config.AskTime, rivalTimeout))
	defer cancel()
	var rival error
	r.peers.askRelatives(ctx, home, r.config.JoinKey, addresses, func(address string, g fencing.Generation) {
		order, ordered := own.Compare(g)
		switch e := (&RivalError{Address: address, Own: own, Other: g}); {
		case g == own:
		case g.Number > own.Number+maxAhead:
			r.config.Log.Error("a server claims a generation that is far ahead: ignoring it", "at", address,
				"generation", g.String(), "own", own.String())
		case !ordered || order < 0:
			rival = e
		default:
			r.config.Log.Warn("a server of an earlier generation of this cluster is "+
				"running", "at", address, "reason", e)
		}
	})
	return rival
}

// keepUnrivalled looks for rivals periodically until ctx ends, and stops this member if it must not serve. No leader
// serves before its member has looked for the first time.
func (r *Replica) keepUnrivalled(ctx context.Context) {
	tick := time.NewTicker(cmp.Or(r.config.RivalsEvery, rivalsEvery))
	defer tick.Stop()
	var met notify.Signal
	if r.peers != nil {
		met = r.peers.met
	}
	for first := true; ; first = false {
		if err := r.Rival(ctx); err != nil {
			if first { // it does not serve yet, and the rival must find this server too
				r.config.Log.Error("another generation of the cluster is running", "error", err)
				pause(ctx, rivalLinger)
			}
			r.config.Fatal(err)
			return
		}
		if first {
			close(r.unrivalled)
		}
		select {
		case <-tick.C:
		case <-met:
			pause(ctx, rivalPause)
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// Unrivalled returns a channel that is closed once this member has looked for other generations of its cluster, and may
// serve.
func (r *Replica) Unrivalled() <-chan struct{} { return r.unrivalled }
