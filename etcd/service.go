package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

// service is what one exchange with etcd does, for package engine. A request is a key on a lease. The keys of a name,
// in the order of their create revisions, are its queue, and the create revision of a hold's key is its token.
type service struct {
	client  *clientv3.Client
	prefix  string
	clock   backend.Clock
	log     *slog.Logger
	unfit   error        // in the client or the options
	conns   *connections // of a client that Open made, which Close closes; else nil
	members *members     // likewise
	station int64        // where the requests of this driver stand first: see keys.go
	batch   *engine.Batch[step, answer]
	turns   turns
	life    context.Context // of steps
	end     context.CancelFunc

	history  history
	single   atomic.Bool  // the cluster has one voting member
	troubled atomic.Int64 // an Instant: until then requests ask for a leader
	most     atomic.Int64 // operations in a transaction
	checked  sync.Once    // its servers were asked for their versions
}

const (
	minTTL = time.Second
	// maxTTL catches mistakes of unit, such as nanoseconds taken for seconds.
	maxTTL = 30 * 24 * time.Hour
	// maxOps stays below the 128 operations that a server allows in a transaction by default.
	maxOps = 100
	// maxTogether leaves room below that for the operations of each step.
	maxTogether = 60
	// maxWrites bounds the tries of "read, then write if the key is unchanged".
	maxWrites = 8
	// stepTime is the maximum time of a step, whether or not its caller waits.
	stepTime = 2 * time.Second
	// troubleTime is for how long after a failure requests ask for a leader. It is longer than an election.
	troubleTime = 30 * time.Second
)

// Unfit is engine.Checked's.
func (e *service) Unfit() error { return e.unfit }

// Endpoints is engine.Replicated's.
func (e *service) Endpoints() int { return len(e.client.Endpoints()) }

// Describe is engine.Service's.
func (e *service) Describe() backend.Description {
	exclusion := backend.ExclusionQuorum
	if e.single.Load() {
		exclusion = backend.ExclusionDurableServer
	}
	return backend.Description{
		Name: driverName, Clock: e.clock, Exclusion: exclusion, KeepsHolds: true,
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapMetadata | backend.CapPushLoss |
			backend.CapInspect | backend.CapList | backend.CapWatch | backend.CapWatchReplay | backend.CapForceRelease |
			backend.CapShared | backend.CapPermits | backend.CapMultiAcquire,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: time.Second,
		TokenSpace: e.history.tokenSpace().name,
		Shows: backend.Shows{
			Look:         backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true, Queue: true, QueueSince: true},
			List:         backend.StateFields{Since: true, Limit: true, Waiters: true},
			ChangeAuthor: true,
		},
	}
}

// PromptEnters is engine.PromptEnters's: these steps send nothing but by do.
func (e *service) PromptEnters() {}

// Classify knows the errors that etcd gives before it applies anything, and those of a request that never left. gRPC
// has no code for the latter, so the texts of its balancer and dialler are looked for. A text that changes would count
// as unknown, which is safe.
func (e *service) Classify(err error) engine.Class { return classOf(err) }

func classOf(err error) engine.Class {
	text := rpctypes.ErrorDesc(err)
	switch {
	case isOneOf(err, rpctypes.ErrLeaseNotFound):
		return engine.NoSession
	case isOneOf(err,
		rpctypes.ErrPermissionDenied, rpctypes.ErrAuthFailed, rpctypes.ErrAuthNotEnabled, rpctypes.ErrUserEmpty):
		return engine.Never
	case isOneOf(err, rpctypes.ErrNoSpace, rpctypes.ErrTooManyRequests, rpctypes.ErrNoLeader,
		rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrRequestTooLarge, rpctypes.ErrTooManyOps,
		rpctypes.ErrNotCapable, rpctypes.ErrNotLeader, rpctypes.ErrDuplicateKey),
		text == rpctypes.ErrorDesc(rpctypes.ErrGRPCNotSupportedForLearner):
		return engine.NotDone
	case status.Code(err) == codes.Unavailable && (strings.Contains(text, "rror while dialing") ||
		strings.Contains(text, "no address available") || strings.Contains(text, "no connection available")):
		return engine.NotDone
	}
	return engine.Unknown
}

// isOneOf reports whether err is one of etcd's errors.
func isOneOf(err error, etcdErrors ...error) bool {
	err = rpctypes.Error(err)
	return slices.ContainsFunc(etcdErrors, func(e error) bool { return errors.Is(err, e) })
}

// Close is engine.Service's.
func (e *service) Close(context.Context) error {
	e.end()
	if e.conns == nil {
		return nil
	}
	return e.client.Close()
}

// request returns the context of a request. A server that lost its leader lets requests hang unless they ask it to have
// one. Asking costs a tenth of a request on both sides, so it is done only after something has failed.
func (e *service) request(ctx context.Context) context.Context {
	if int64(e.clock.Now()) < e.troubled.Load() {
		return clientv3.WithRequireLeader(ctx)
	}
	return ctx
}

// get reads linearizably. The answer is returned even with an error that reports a lost history.
func (e *service) get(ctx context.Context, key string, o ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	since := e.history.mark()
	resp, err := e.client.Get(e.request(ctx), key, o...)
	if err != nil {
		e.trouble()
		return nil, err
	}
	return resp, e.hear(ctx, resp.Header, since)
}

func (e *service) trouble() { e.troubled.Store(int64(e.clock.Now().Add(troubleTime))) }

// txn is a separate transaction, with the same two results as get.
func (e *service) txn(
	ctx context.Context, cmps []clientv3.Cmp, then, otherwise []clientv3.Op,
) (*clientv3.TxnResponse, error) {
	since := e.history.mark()
	resp, err := e.client.Txn(e.request(ctx)).If(cmps...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		e.trouble()
		return nil, err
	}
	return resp, e.hear(ctx, resp.Header, since)
}

// step is the part of one call that is done atomically: comparisons, and operations for either outcome.
type step struct {
	values          context.Context // of the caller, for a step that goes alone
	cmps            []clientv3.Cmp
	then, otherwise []clientv3.Op
	// grants: only in the token space that the driver knows. A release is done in any.
	grants bool
}

type answer struct {
	resp *clientv3.TxnResponse
	err  error
}

// do carries out a step, with those of other names or, without a name, alone. The step continues when ctx ends: the
// server could carry out a request that was cancelled.
func (e *service) do(ctx context.Context, name string, s step) (*clientv3.TxnResponse, error) {
	s.values = ctx
	var answers <-chan answer
	if name == "" {
		alone := make(chan answer, 1)
		go func() { alone <- e.send([]step{s})[0] }()
		answers = alone
	} else {
		answers = e.batch.Send(name, s)
	}
	a, how := engine.Await(ctx, answers, nil)
	if how != engine.Answered {
		return nil, &engine.Unanswered{Landed: func(ctx context.Context) {
			select {
			case <-answers:
			case <-ctx.Done():
			}
		}}
	}
	if kit.IsContext(a.err) { // the step's own, which has ended
		a.err = &engine.Unanswered{}
	}
	return a.resp, a.err
}

// look is a step that only reads.
func (e *service) look(ctx context.Context, ops ...clientv3.Op) (*clientv3.TxnResponse, error) {
	return e.do(ctx, "", step{then: ops})
}

// queue reads the keys of a name.
func (e *service) queue(ctx context.Context, name string) (kvs []*mvccpb.KeyValue, revision int64, err error) {
	resp, err := e.look(ctx, clientv3.OpGet(e.dir(name), clientv3.WithPrefix()))
	if err != nil {
		return nil, 0, err
	}
	return resp.Responses[0].GetResponseRange().Kvs, resp.Header.Revision, nil
}

// send carries out steps in one transaction, each with its own comparisons and its own answer, nested below a
// comparison of the token space. In another space the steps that release are still done. Steps that are refused
// together are sent one by one: the refusal may be for the sake of another step.
func (e *service) send(steps []step) []answer {
	all := make([]answer, len(steps))
	ctx := e.life
	if len(steps) == 1 {
		ctx = context.WithoutCancel(steps[0].values)
	}
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	defer context.AfterFunc(e.life, cancel)()
	if len(steps) == 1 && !steps[0].grants {
		all[0].resp, all[0].err = e.txn(ctx, steps[0].cmps, steps[0].then, steps[0].otherwise)
		return all
	}
	var then, otherwise []clientv3.Op
	for _, s := range steps {
		op := clientv3.OpTxn(s.cmps, s.then, s.otherwise)
		then = append(then, op)
		if s.grants {
			op = clientv3.OpGet(e.spaceKey())
		}
		otherwise = append(otherwise, op)
	}
	resp, err := e.txn(ctx, []clientv3.Cmp{e.sameSpace()}, then, otherwise)
	if len(steps) > 1 && resp == nil && e.Classify(err) != engine.Unknown {
		if isOneOf(err, rpctypes.ErrTooManyOps) {
			e.batch.Limit(len(steps) / 2)
		}
		var work sync.WaitGroup
		for i := range steps {
			work.Go(func() { all[i] = e.send(steps[i : i+1])[0] })
		}
		work.Wait()
		return all
	}
	for i, s := range steps {
		switch {
		case resp == nil:
			all[i].err = err
		case s.grants && !resp.Succeeded:
			if all[i].err = e.checkSpace(ctx, resp.Responses[i].GetResponseRange().Kvs); all[i].err == nil {
				all[i].err = errChanged
			}
		default:
			inner := resp.Responses[i].GetResponseTxn()
			inner.Header = resp.Header
			all[i] = answer{(*clientv3.TxnResponse)(inner), err}
		}
	}
	return all
}

// errChanged: what was read has changed before it was written.
var errChanged = fmt.Errorf("%w: others change the name at the same moment", backend.ErrUnavailable)

// inParts calls do with parts of a list, of as many as the server allows in a transaction, and of up to most.
func inParts[T any](e *service, all []T, most int, do func(part []T) error) error {
	for len(all) > 0 {
		n := min(len(all), most, int(e.most.Load()))
		err := do(all[:n])
		if n > 1 && isOneOf(err, rpctypes.ErrTooManyOps) {
			e.most.Store(int64((n + 1) / 2))
			continue
		}
		if err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}

// turns admits one caller at a time for each name.
type turns struct {
	mu   sync.Mutex // protects the following field
	busy map[string]chan struct{}
}

// take waits for the turn, until ctx ends.
func (t *turns) take(ctx context.Context, name string) (leave func(), err error) {
	for {
		t.mu.Lock()
		busy := t.busy[name]
		if busy == nil {
			if t.busy == nil {
				t.busy = map[string]chan struct{}{}
			}
			busy = make(chan struct{})
			t.busy[name] = busy
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				defer t.mu.Unlock()
				delete(t.busy, name)
				close(busy)
			}, nil
		}
		t.mu.Unlock()
		if _, how := engine.Await(ctx, busy, nil); how != engine.Answered {
			return nil, fmt.Errorf("%w: other requests for the name take long", backend.ErrUnavailable)
		}
	}
}

// voters returns the members that vote. A learner cannot lead, so a server with learners is a single one.
func voters(members []*pb.Member) []*pb.Member {
	return slices.DeleteFunc(members, (*pb.Member).GetIsLearner)
}
