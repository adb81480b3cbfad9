package replica

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/notify"
)

// Members talk to each other on one port. With TLS each shows a certificate that names the host of the address at
// which the others know it: see certificate.go. Every connection begins with a preface: its purpose, the dialer's
// cluster and, if it is for raft, the member it is for. Connections from another cluster or for another member are
// closed before raft sees them; such questions outside of raft are answered with the reason.
const (
	prefaceMagic   = "FLP1"
	forRaft        = 'r' // from a member of a feature level that names no starts
	forProcess     = 'p' // for raft, with a claim: see processes.go
	forQuestions   = 'q'
	prefaceTimeout = 5 * time.Second
	answerTimeout  = 5 * time.Second
	maxQuestion    = 64 << 10 // bytes
)

// peerNet is the network between the members: raft's stream layer, and questions beside it.
type peerNet struct {
	listener  net.Listener
	advertise string
	tls       *tls.Config // nil: in the clear
	open      func(ctx context.Context, address string) (net.Conn, error)
	home      func() string // the present cluster, empty without one
	log       *slog.Logger

	now atomic.Pointer[speaker] // set before serve

	met notify.Signal // a member of another generation of the cluster asked

	forRaft chan net.Conn
	done    chan struct{}
	serving sync.WaitGroup
	asking  chan struct{} // has room for one: others are asked about a certificate

	came notify.Signal // a process waits to count

	mu        sync.Mutex
	conns     map[*trackedConn]struct{} // all that are open
	newcomers map[raft.ServerID]*newcomer
	book      map[raft.ServerID]string
	told      []string // addresses of members that this one may not know yet, from the members that it knows
}

// speaker answers for this member: one during the start, and another one from then on.
type speaker struct {
	self    *Replica        // nil during the start: no connection is for raft then
	members func() []string // the addresses of the members; empty if there is no cluster yet
	answer  func(question) answer
}

// question is a request to another member outside of raft.
type question struct {
	// Join asks the leader to add this member.
	Join *member `json:"join,omitempty"`
	// Index asks the leader for the end of the log that was acknowledged to anybody.
	Index bool `json:"index,omitempty"`
	// Prove asks for a proof that the member knows the key, over these bytes.
	Prove []byte `json:"prove,omitempty"`
	// Starting asks for objections to a start, and Who for the answering member, even while that one starts.
	Starting *starting `json:"starting,omitempty"`
	Who      bool      `json:"who,omitempty"`
}

// member is a member's description for the others.
type member struct {
	ID     raft.ServerID `json:"id"`
	Peer   string        `json:"peer"`
	Client string        `json:"client"`
	// Level is the highest feature level of its version; zero: the first.
	Level uint32 `json:"level,omitempty"`
	// MaxTTL is the greatest TTL of a session that it grants when it leads; zero from versions that do not report it.
	MaxTTL time.Duration `json:"maxTTL,omitempty"`
	// Start names the process; empty from versions that do not report it.
	Start string `json:"start,omitempty"`
}

// answer has the answering member, and the result of the question.
type answer struct {
	member
	// Fresh: this member belongs to no cluster yet.
	Fresh bool `json:"fresh"`
	// Leader is the leader's address among the members, if known.
	Leader string `json:"leader,omitempty"`
	// Members are the addresses of all known members, including this one.
	Members []string `json:"members,omitempty"`
	// Index answers question.Index; zero from a member that does not lead.
	Index uint64 `json:"index,omitempty"`
	// Proof answers question.Prove.
	Proof []byte `json:"proof,omitempty"`
	// Maintenance: it leads only if nobody else does.
	Maintenance bool `json:"maintenance,omitempty"`
	// Relative is the cluster of the answering member, even if it is another one.
	Relative *relative `json:"relative,omitempty"`
	// Known is the end of the log of the starting member, as far as this one knows, and Runs the address of another
	// process of that member.
	Known uint64 `json:"known,omitempty"`
	Runs  string `json:"runs,omitempty"`
	// Recorded is the start of that member that counts.
	Recorded string `json:"recorded,omitempty"`
	// Joined: the member that asked to join is a member now.
	Joined bool `json:"joined,omitempty"`
	// Error says why not.
	Error string `json:"error,omitempty"`

	certificate *x509.Certificate // with which it was given; nil without TLS
}

func newPeerNet(c *Config, home func() string) *peerNet {
	return &peerNet{
		listener: c.Listener, advertise: c.Advertise, home: home, tls: c.TLS, open: c.Dial, log: c.Log,
		met: notify.New(), forRaft: make(chan net.Conn), done: make(chan struct{}), asking: make(chan struct{}, 1),
		conns: map[*trackedConn]struct{}{}, newcomers: map[raft.ServerID]*newcomer{}, came: notify.New(),
	}
}

// serve accepts connections until Close.
func (p *peerNet) serve() {
	p.serving.Go(func() {
		for {
			conn, err := p.listener.Accept()
			if err != nil {
				if p.closed() {
					return
				}
				p.log.Warn("accepting a member failed", "error", err)
				time.Sleep(50 * time.Millisecond) // out of file descriptors, most likely
				continue
			}
			p.serving.Go(func() { p.welcome(conn) })
		}
	})
}

func (p *peerNet) closed() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// welcome reads the preface and forwards the connection.
func (p *peerNet) welcome(conn net.Conn) {
	if p.tls != nil {
		conn = tls.Server(conn, p.tls) // which asks GetConfigForClient itself
	}
	conn, ok := p.track(conn)
	if !ok {
		return
	}
	conn.SetDeadline(time.Now().Add(prefaceTimeout))
	kind, who, err := p.readPreface(conn)
	if kind != forQuestions && err == nil {
		err = p.checkCertificate(certificateOf(conn))
	}
	if kind == forProcess && err == nil {
		err = p.now.Load().self.meet(conn, who)
	}
	if err != nil && !errors.Is(err, errStarting) {
		p.log.Warn("a member was refused", "from", conn.RemoteAddr().String(), "error", err)
	}
	if kind == forQuestions {
		p.reply(conn, err)
		return
	}
	if err != nil {
		conn.Close()
		return
	}
	conn.SetDeadline(time.Time{})
	select {
	case p.forRaft <- conn:
	case <-p.done:
		conn.Close()
	}
}

// reply answers a question, or returns the reason for a refusal.
func (p *peerNet) reply(conn net.Conn, foreign error) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(answerTimeout))
	var q question
	if err := json.NewDecoder(io.LimitReader(conn, maxQuestion)).Decode(&q); err != nil {
		return
	}
	var a answer
	now := p.now.Load()
	if foreign != nil {
		a.Error = foreign.Error()
	} else {
		a = now.answer(q)
	}
	if now.self != nil {
		now.self.relate(&a, q)
	}
	_ = json.NewEncoder(conn).Encode(a) // the other side repeats the question
}

// readPreface returns the purpose of the connection, even with an error if it is known.
func (p *peerNet) readPreface(conn net.Conn) (kind byte, who *claim, err error) {
	head := make([]byte, len(prefaceMagic)+3)
	if _, err := io.ReadFull(conn, head); err != nil {
		return 0, nil, err
	}
	kind = head[len(prefaceMagic)]
	theirs, member := make([]byte, head[len(head)-2]), make([]byte, head[len(head)-1])
	for _, part := range [][]byte{theirs, member} {
		if _, err := io.ReadFull(conn, part); err != nil {
			return 0, nil, err
		}
	}
	who = &claim{to: raft.ServerID(member)}
	if kind == forProcess {
		if who, err = readClaim(string(member)); err != nil {
			return 0, nil, err
		}
	}
	self := p.now.Load().self
	switch ours := p.home(); {
	case string(head[:len(prefaceMagic)]) != prefaceMagic, kind != forRaft && kind != forProcess && kind != forQuestions:
		return 0, nil, errors.New("it is no member")
	case ours != "" && len(theirs) > 0 && ours != string(theirs):
		if clusterOf(ours) == clusterOf(string(theirs)) {
			p.met.Notify()
		}
		return kind, nil, fmt.Errorf("who asks is a member of cluster %q, who answers of cluster %q", theirs, ours)
	case fromBackup(ours) && len(theirs) == 0 && kind != forQuestions:
		// Members of a restored cluster know its name from the beginning. A member without the name is of the cluster
		// before it.
		return kind, nil, fmt.Errorf("who asks does not know its cluster, who answers is of cluster %q", ours)
	case kind == forQuestions:
	case self == nil:
		return 0, nil, errStarting
	case who.to != self.id:
		return 0, nil, fmt.Errorf("it is looking for the member %q, which was here before %q", who.to, self.id)
	}
	return kind, who, nil
}

// preface is the beginning of a connection: kind, the dialer's cluster or "", and for raft the member that it is for,
// or a claim.
func preface(kind byte, home, member string) []byte {
	p := append([]byte(prefaceMagic), kind, byte(len(home)), byte(len(member)))
	return append(append(p, home...), member...)
}

// dialling returns the configuration of TLS for one connection to another member. If it comes from files that may
// have been replaced, GetConfigForClient returns their present content, for both directions.
func (p *peerNet) dialling() (*tls.Config, error) {
	config := p.tls
	if config.GetConfigForClient != nil {
		now, err := config.GetConfigForClient(&tls.ClientHelloInfo{})
		if err != nil {
			return nil, err
		}
		if now != nil {
			config = now
		}
	}
	config = config.Clone()
	config.ServerName = p.tls.ServerName
	return config, nil
}

// dialMember connects to a member at an address, for raft.
func (p *peerNet) dialMember(ctx context.Context, address string, id raft.ServerID) (net.Conn, error) {
	self := p.now.Load().self
	if self == nil || !self.namesStarts() {
		conn, err := p.dial(ctx, address, forRaft, string(id))
		if err == nil {
			p.name(conn, id, "", true)
		}
		return conn, err
	}
	conn, err := p.dial(ctx, address, forProcess, self.claimTo(id).String())
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	conn.SetDeadline(deadline)
	if err := self.greet(conn, id); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	conn.SetDeadline(time.Time{})
	return conn, nil
}

// dial connects to address, and sends the preface.
func (p *peerNet) dial(ctx context.Context, address string, kind byte, member string) (net.Conn, error) {
	conn, err := p.open(ctx, address)
	if err != nil {
		return nil, err
	}
	if p.tls != nil {
		config, err := p.dialling()
		if err != nil {
			return nil, errors.Join(err, conn.Close())
		}
		if config.ServerName == "" {
			config.ServerName, _, _ = net.SplitHostPort(address) // it was dialled, so it has a host
		}
		conn = tls.Client(conn, config)
	}
	conn, ok := p.track(conn)
	if !ok {
		return nil, net.ErrClosed
	}
	home := p.home()
	deadline, _ := ctx.Deadline()
	conn.SetDeadline(deadline)
	if _, err := conn.Write(preface(kind, home, member)); err != nil {
		conn.Close()
		return nil, err
	}
	conn.SetDeadline(time.Time{})
	return conn, nil
}

// ask asks the member at address. The error says that no answer came; an answer can have an error itself.
func (p *peerNet) ask(ctx context.Context, address string, q question) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	conn, err := p.dial(ctx, address, forQuestions, "")
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := json.NewEncoder(conn).Encode(q); err != nil {
		return answer{}, err
	}
	var a answer
	if err := json.NewDecoder(io.LimitReader(conn, maxQuestion)).Decode(&a); err != nil {
		return answer{}, err
	}
	if a.ID == "" {
		return a, fmt.Errorf("refused: %s", a.Error)
	}
	a.certificate = certificateOf(conn)
	return a, nil
}

// Accept implements raft.StreamLayer.
func (p *peerNet) Accept() (net.Conn, error) {
	select {
	case conn := <-p.forRaft:
		return conn, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// Dial implements raft.StreamLayer for addresses of addressed. Names are resolved anew each time: members may move.
func (p *peerNet) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	member, there := splitAt(address)
	if found := p.whereabouts(member); found != "" && found != there {
		soon, cancel := context.WithTimeout(ctx, timeout/2)
		defer cancel()
		if conn, err := p.dialMember(soon, found, member); err == nil {
			return conn, nil
		}
	}
	return p.dialMember(ctx, there, member)
}

// Addr implements raft.StreamLayer with the address at which the others find this member.
func (p *peerNet) Addr() net.Addr { return peerAddr(p.advertise) }

type peerAddr string

func (peerAddr) Network() string  { return "tcp" }
func (a peerAddr) String() string { return string(a) }

// Close implements raft.StreamLayer. It also ends the connections that raft holds, which raft itself forgets.
func (p *peerNet) Close() error {
	p.mu.Lock()
	if p.closed() {
		p.mu.Unlock()
		return nil
	}
	close(p.done)
	open := slices.Collect(maps.Keys(p.conns))
	p.mu.Unlock()
	err := p.listener.Close()
	for _, conn := range open {
		_ = conn.Close() // it is over
	}
	return err
}

// track remembers conn until it is closed, and refuses it after Close.
func (p *peerNet) track(conn net.Conn) (net.Conn, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed() {
		conn.Close()
		return nil, false
	}
	t := &trackedConn{Conn: conn, net: p}
	p.conns[t] = struct{}{}
	return t, true
}

type trackedConn struct {
	net.Conn
	net *peerNet

	// For raft: the member at the other end, and its start, empty if it did not say. The fields are protected by net.mu.
	member  raft.ServerID
	start   string
	dialled bool // by this member
}

func (c *trackedConn) Close() error {
	c.net.mu.Lock()
	delete(c.net.conns, c)
	c.net.mu.Unlock()
	return c.Conn.Close()
}
