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

// Members communicate on one port. With TLS each member has a certificate that names the host of its address: see
// certificate.go. Every connection begins with a preface: its purpose, the dialer's cluster and, for raft, the id of
// the member to reach. Connections from another cluster or for another member are closed before raft sees them.
// Questions outside of raft from another cluster are answered with the reason for the refusal.
const (
	prefaceMagic   = "FLP1"
	forRaft        = 'r' // for raft, from a member at a feature level without starts
	forProcess     = 'p' // for raft, with a claim: see processes.go
	forQuestions   = 'q'
	prefaceTimeout = 5 * time.Second
	answerTimeout  = 5 * time.Second
	maxQuestion    = 64 << 10 // bytes
)

// peerNet is the network between the members: raft's stream layer, and questions outside of raft.
type peerNet struct {
	listener  net.Listener
	advertise string
	tls       *tls.Config // nil: unencrypted
	open      func(ctx context.Context, address string) (net.Conn, error)
	home      func() string // the current cluster; empty if there is none
	log       *slog.Logger

	now atomic.Pointer[speaker] // set before serve

	met notify.Signal // notified when a member of another generation connects

	forRaft chan net.Conn
	done    chan struct{}
	serving sync.WaitGroup
	asking  chan struct{} // capacity 1; held while askAround runs

	came notify.Signal // notified when a process waits to count

	mu        sync.Mutex
	conns     map[*trackedConn]struct{} // all open connections
	newcomers map[raft.ServerID]*newcomer
	book      map[raft.ServerID]string
	told      []string // addresses of further members, from the known members
}

// speaker answers for this member. There is one for the time of the start, and another from then on.
type speaker struct {
	self    *Replica        // nil during the start, without connections for raft
	members func() []string // their addresses; nil or empty if there is no cluster yet
	answer  func(question) answer
}

// question is a request to another member outside of raft.
type question struct {
	// Join asks the leader to add this member.
	Join *member `json:"join,omitempty"`
	// Index asks the leader for the end of the log that it has acknowledged to anybody.
	Index bool `json:"index,omitempty"`
	// Prove is a nonce. It asks for a proof that the member knows the key.
	Prove []byte `json:"prove,omitempty"`
	// Starting asks for objections to a start. Who asks for the identity of the answering member, even while it starts.
	Starting *starting `json:"starting,omitempty"`
	Who      bool      `json:"who,omitempty"`
}

// member describes a member to the others.
type member struct {
	ID     raft.ServerID `json:"id"`
	Peer   string        `json:"peer"`
	Client string        `json:"client"`
	// Level is the highest feature level that it supports; zero means level 1.
	Level uint32 `json:"level,omitempty"`
	// MaxTTL is the greatest TTL of a session that it grants when it leads; zero in versions that do not report it.
	MaxTTL time.Duration `json:"maxTTL,omitempty"`
	// Start identifies the process; empty in versions that do not report it.
	Start string `json:"start,omitempty"`
}

// answer describes the answering member, and has the result of the question.
type answer struct {
	member
	// Fresh reports that the answering member belongs to no cluster yet.
	Fresh bool `json:"fresh"`
	// Leader is the leader's address for other members, if known.
	Leader string `json:"leader,omitempty"`
	// Members are the addresses of all known members, including the answering member.
	Members []string `json:"members,omitempty"`
	// Index answers question.Index; zero from a member that does not lead.
	Index uint64 `json:"index,omitempty"`
	// Proof answers question.Prove.
	Proof []byte `json:"proof,omitempty"`
	// Maintenance reports that the answering member leads only if no other member does.
	Maintenance bool `json:"maintenance,omitempty"`
	// Relative is the cluster of the answering member, even if it refuses the question.
	Relative *relative `json:"relative,omitempty"`
	// Known is the known end of the log of the starting member, and Runs is the address of another process of it.
	Known uint64 `json:"known,omitempty"`
	Runs  string `json:"runs,omitempty"`
	// Recorded is the start that counts for the starting member.
	Recorded string `json:"recorded,omitempty"`
	// Joined reports that the server that asked to join is now a member.
	Joined bool `json:"joined,omitempty"`
	// Error is the reason for a refusal.
	Error string `json:"error,omitempty"`

	certificate *x509.Certificate // of the answering member; nil without TLS
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
				time.Sleep(50 * time.Millisecond) // most likely there are no more file descriptors
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

// welcome reads the preface of a connection, and answers the question or passes the connection to raft.
func (p *peerNet) welcome(conn net.Conn) {
	if p.tls != nil {
		conn = tls.Server(conn, p.tls) // tls calls GetConfigForClient
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

// reply answers a question, with foreign as the reason for a refusal if it is not nil.
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
	_ = json.NewEncoder(conn).Encode(a) // an error makes the other side retry
}

// readPreface reads and checks the preface of a connection. With an error it returns the kind only if the connection
// may be answered.
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
		// Members of a restored cluster know its name from the beginning. A member without the name belongs to the cluster
		// before the restore.
		return kind, nil, fmt.Errorf("who asks does not know its cluster, who answers is of cluster %q", ours)
	case kind == forQuestions:
	case self == nil:
		return 0, nil, errStarting
	case who.to != self.id:
		return 0, nil, fmt.Errorf("it is looking for the member %q, which was here before %q", who.to, self.id)
	}
	return kind, who, nil
}

// preface returns the beginning of a connection: kind, the dialer's cluster or "", and for raft the member to reach or
// a claim.
func preface(kind byte, home, member string) []byte {
	p := append([]byte(prefaceMagic), kind, byte(len(home)), byte(len(member)))
	return append(append(p, home...), member...)
}

// dialling returns the TLS configuration for one connection to another member. If the configuration comes from files,
// GetConfigForClient returns their current content, which is also valid for clients.
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

// namesStarts reports whether connections for raft name starts.
func (p *peerNet) namesStarts() bool {
	self := p.now.Load().self
	return self != nil && self.namesStarts()
}

// dialMember connects to a member at an address, for raft.
func (p *peerNet) dialMember(ctx context.Context, address string, id raft.ServerID) (net.Conn, error) {
	if !p.namesStarts() {
		conn, err := p.dial(ctx, address, forRaft, string(id))
		if err != nil {
			return nil, err
		}
		p.name(conn, id, "", true)
		return &unnamedConn{conn, p}, nil
	}
	self := p.now.Load().self
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
			config.ServerName, _, _ = net.SplitHostPort(address) // no error: open has dialled the address
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

// ask asks a question of the member at address. It returns an error if there is no answer, or if a server that does not
// identify itself refuses the question. An answer can contain another error.
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

// Dial implements raft.StreamLayer for the addresses of type addressed. It first tries the address at which look found
// the member. It resolves host names each time: members may move.
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

// Addr implements raft.StreamLayer. It returns the address of this member for other members.
func (p *peerNet) Addr() net.Addr { return peerAddr(p.advertise) }

type peerAddr string

func (peerAddr) Network() string  { return "tcp" }
func (a peerAddr) String() string { return string(a) }

// Close implements raft.StreamLayer. It also closes the connections that raft has, since raft does not close them.
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
		_ = conn.Close() // the connection is not used any longer
	}
	return err
}

// track records conn until it is closed. After Close it closes conn and returns false.
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

	// For raft: the member at the other end, and its start, which is empty at feature levels without starts. net.mu
	// protects the fields.
	member  raft.ServerID
	start   string
	dialled bool // by this member
}

// unnamedConn is a connection for raft that this member has dialled without its start. It carries no request once
// connections name starts: the other member could not tell that this process has been replaced.
type unnamedConn struct {
	net.Conn
	net *peerNet
}

var errUnnamed = errors.New("the connection does not name this process, and by now connections must")

func (c *unnamedConn) Write(data []byte) (int, error) {
	if c.net.namesStarts() {
		return 0, errors.Join(errUnnamed, c.Close())
	}
	return c.Conn.Write(data)
}

func (c *trackedConn) Close() error {
	c.net.mu.Lock()
	delete(c.net.conns, c)
	c.net.mu.Unlock()
	return c.Conn.Close()
}
