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
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// Members talk to each other on one port. With TLS each shows a certificate that names the host of the address at which
// the others know it: see certificate.go. Every connection begins with a preface that says what it is for, of which
// cluster the dialer is and, if it is for raft, which member it is for: those of another cluster or for another member
// are turned away before raft hears of them. What is asked without raft is answered with the reason then.
const (
	prefaceMagic   = "FLP1"
	forRaft        = 'r'
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
	home      func() string // the present cluster, empty for none
	log       *slog.Logger

	// set by serve
	members func() []string // the addresses of the members, none if there is no cluster yet
	self    raft.ServerID
	answer  func(question) answer

	forRaft chan net.Conn
	done    chan struct{}
	serving sync.WaitGroup
	asking  chan struct{} // has room for one: others are asked about a certificate

	mu    sync.Mutex
	conns map[net.Conn]struct{} // all that are open
	told  []string              // addresses of members that this one may not know of yet, from those that it knows
}

// question is what one member asks another outside of raft.
type question struct {
	// Join asks the leader to take this member in.
	Join *member `json:"join,omitempty"`
	// Index asks the leader how far the log goes of what was acknowledged to anybody.
	Index bool `json:"index,omitempty"`
	// Prove asks for a proof that the member knows the key, over these bytes.
	Prove []byte `json:"prove,omitempty"`
}

// member is what members know of each other.
type member struct {
	ID     raft.ServerID `json:"id"`
	Peer   string        `json:"peer"`
	Client string        `json:"client"`
	// Level is the highest feature level that its version knows; zero: the first.
	Level uint32 `json:"level,omitempty"`
}

// answer tells who answers, and what became of the question.
type answer struct {
	member
	// Fresh: this member belongs to no cluster yet.
	Fresh bool `json:"fresh"`
	// Leader is the address among the members of the one who leads, if known.
	Leader string `json:"leader,omitempty"`
	// Members are the addresses of all that this one knows of, itself included.
	Members []string `json:"members,omitempty"`
	// Index is what was asked for with Index; zero from who does not lead.
	Index uint64 `json:"index,omitempty"`
	// Proof is what was asked for with Prove.
	Proof []byte `json:"proof,omitempty"`
	// Maintenance: it leads only if nobody else does.
	Maintenance bool `json:"maintenance,omitempty"`
	// Joined: the member that asked to join is in.
	Joined bool `json:"joined,omitempty"`
	// Error says why not.
	Error string `json:"error,omitempty"`

	certificate *x509.Certificate // with which it was given; nil without TLS
}

func newPeerNet(c *Config, home func() string) *peerNet {
	return &peerNet{
		listener: c.Listener, advertise: c.Advertise, home: home, tls: c.TLS, open: c.Dial, log: c.Log,
		forRaft: make(chan net.Conn), done: make(chan struct{}), asking: make(chan struct{}, 1),
		conns: map[net.Conn]struct{}{},
	}
}

// serve accepts connections to the member self until Close, and has reply answer questions. members are the addresses
// of all that this member knows of.
func (p *peerNet) serve(self raft.ServerID, members func() []string, reply func(question) answer) {
	p.self, p.members, p.answer = self, members, reply
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

// welcome reads the preface and hands the connection on.
func (p *peerNet) welcome(conn net.Conn) {
	if p.tls != nil {
		conn = tls.Server(conn, p.tls)
	}
	conn, ok := p.track(conn)
	if !ok {
		return
	}
	conn.SetDeadline(time.Now().Add(prefaceTimeout))
	kind, err := p.readPreface(conn)
	if kind == forRaft && err == nil {
		err = p.checkCertificate(certificateOf(conn))
	}
	if err != nil {
		p.log.Warn("a member was turned away", "from", conn.RemoteAddr().String(), "error", err)
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

// reply answers a question, or says why it does not.
func (p *peerNet) reply(conn net.Conn, foreign error) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(answerTimeout))
	var q question
	if err := json.NewDecoder(io.LimitReader(conn, maxQuestion)).Decode(&q); err != nil {
		return
	}
	var a answer
	if foreign != nil {
		a.Error = foreign.Error()
	} else {
		a = p.answer(q)
	}
	_ = json.NewEncoder(conn).Encode(a) // the other side asks again
}

// readPreface returns what the connection is for; with an error too, if that is known.
func (p *peerNet) readPreface(conn net.Conn) (kind byte, err error) {
	head := make([]byte, len(prefaceMagic)+3)
	if _, err := io.ReadFull(conn, head); err != nil {
		return 0, err
	}
	kind = head[len(prefaceMagic)]
	theirs, member := make([]byte, head[len(head)-2]), make([]byte, head[len(head)-1])
	for _, part := range [][]byte{theirs, member} {
		if _, err := io.ReadFull(conn, part); err != nil {
			return 0, err
		}
	}
	switch ours := p.home(); {
	case string(head[:len(prefaceMagic)]) != prefaceMagic, kind != forRaft && kind != forQuestions:
		return 0, errors.New("it is no member")
	case ours != "" && len(theirs) > 0 && ours != string(theirs):
		return kind, fmt.Errorf("who asks is a member of cluster %q, who answers of cluster %q", theirs, ours)
	case fromBackup(ours) && len(theirs) == 0 && kind == forRaft:
		// Members of a restored cluster know its name from the beginning. One that does not is of what was there
		// before.
		return kind, fmt.Errorf("who asks does not know its cluster, who answers is of cluster %q", ours)
	case kind == forRaft && string(member) != string(p.self):
		return 0, fmt.Errorf("it is looking for the member %q, which was here before %q", member, p.self)
	}
	return kind, nil
}

// preface is what a connection begins with: kind, the dialer's cluster or nothing, and for raft the member that it is
// for.
func preface(kind byte, home string, member raft.ServerID) []byte {
	p := append([]byte(prefaceMagic), kind, byte(len(home)), byte(len(member)))
	return append(append(p, home...), member...)
}

// dial connects to address, for raft to the given member there.
func (p *peerNet) dial(ctx context.Context, address string, kind byte, member raft.ServerID) (net.Conn, error) {
	conn, err := p.open(ctx, address)
	if err != nil {
		return nil, err
	}
	if p.tls != nil {
		config := p.tls.Clone()
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

// ask asks the member at address. The error says that no answer came; an answer can carry an error of its own.
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
		return answer{}, fmt.Errorf("turned away: %s", a.Error)
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
	return p.dial(ctx, there, forRaft, member)
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
	open := make([]net.Conn, 0, len(p.conns))
	for conn := range p.conns {
		open = append(open, conn)
	}
	p.mu.Unlock()
	err := p.listener.Close()
	for _, conn := range open {
		conn.Close()
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
}

func (c *trackedConn) Close() error {
	c.net.mu.Lock()
	delete(c.net.conns, c)
	c.net.mu.Unlock()
	return c.Conn.Close()
}
