package server

import (
	"context"
	"crypto/tls"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/serverfault"
	"github.com/fencelock/fencelock/internal/testcert"
)

const matrixRules = `
allow cert:acquirer acquire            a
allow cert:reader   read               a
allow cert:forcer   force              a
allow cert:peer     acquire,read,force a
allow cert:other    acquire,read,force b
allow cert:auditor  read               ""
allow cert:admin    admin,proxy        ""
allow cert:gateway  proxy              a
`

// matrixCallers are the certificates of callers; the empty one is a client without a certificate.
var matrixCallers = []string{"", "acquirer", "reader", "forcer", "peer", "other", "auditor", "admin", "unknown",
	"gateway"}

// forwardedCalls are those that a gateway may make for a principal that may make them.
var forwardedCalls = []string{"acquire", "acquire_all", "get_holder", "watch", "list"}

// ruledServer is a server with rules, which clients reach with a certificate or without one.
type ruledServer struct {
	*Server
	t         *testing.T
	authority *testcert.Authority
	pairs     map[string]tls.Certificate
}

func startRuled(t *testing.T, rules string, more ...func(*Config)) *ruledServer {
	t.Helper()
	s := &ruledServer{t: t, authority: testcert.New(t), pairs: map[string]tls.Certificate{}}
	config := mutual(t, s.authority)
	config.ClientAuth = tls.VerifyClientCertIfGiven
	c := Config{
		DataDir: t.TempDir(), Listen: "127.0.0.1:0", TLS: config, Rules: rules,
		AdminListen: "127.0.0.1:0", AdminTLS: mutual(t, s.authority),
	}
	for _, change := range more {
		change(&c)
	}
	s.Server = alone(t, c)
	eventually(t, "the rules are in force", s.Ruled)
	return s
}

// tlsOf is what the client with a certificate of that name uses.
func (s *ruledServer) tlsOf(name string) *tls.Config {
	s.t.Helper()
	config := mutual(s.t, s.authority)
	if config.Certificates = nil; name == "" {
		return config
	}
	pair, found := s.pairs[name]
	if !found {
		var err error
		if pair, err = tls.LoadX509KeyPair(s.authority.Sign(s.t, name)); err != nil {
			s.t.Fatal(err)
		}
		s.pairs[name] = pair
	}
	config.Certificates = []tls.Certificate{pair}
	return config
}

func (s *ruledServer) as(name string) *client {
	s.t.Helper()
	conn := grpcTo(s.t, s.Addr().String(), credentials.NewTLS(s.tlsOf(name)))
	stream, err := lockpb.NewLockServiceClient(conn).Connect(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return newClient(s.t, stream, func() {})
}

// admin is the service for operators as the client with a certificate of that name finds it at an address.
func (s *ruledServer) admin(name, at string) lockpb.AdminServiceClient {
	return lockpb.NewAdminServiceClient(grpcTo(s.t, at, credentials.NewTLS(s.tlsOf(name))))
}

// matrixCell is a caller, and what peer has.
type matrixCell struct {
	name    string // of a lock that peer holds
	free    string // of a free name
	session []byte // of the caller
	id      string // of peer's request
	token   uint64
}

func listOf(prefix, after string, limit uint32) *lockpb.Request {
	return &lockpb.Request{Call: &lockpb.Request_List{
		List: &lockpb.List{Prefix: prefix, After: after, Limit: limit},
	}}
}

func forceOf(name string) *lockpb.Request {
	return &lockpb.Request{Call: &lockpb.Request_ForceRelease{
		ForceRelease: &lockpb.ForceRelease{Name: name, Reason: "a test"},
	}}
}

// rulesMatrix has, for each call of a client, who may use it: nil for everybody.
var rulesMatrix = map[string]struct {
	may  []string
	call func(*matrixCell) *lockpb.Request
}{
	"hello": {nil, func(*matrixCell) *lockpb.Request {
		return &lockpb.Request{Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{}}}
	}},
	"open_session": {nil, func(*matrixCell) *lockpb.Request { return openOf(sessionID(), longTTL) }},
	"attach":       {nil, func(x *matrixCell) *lockpb.Request { return attachOf(x.session, "", 0) }},
	"keep_alive":   {nil, func(x *matrixCell) *lockpb.Request { return keepAliveOf(x.session) }},
	"close_session": {nil, func(x *matrixCell) *lockpb.Request {
		return &lockpb.Request{Session: x.session, Call: &lockpb.Request_CloseSession{CloseSession: &lockpb.CloseSession{}}}
	}},
	"acquire": {[]string{"acquirer", "peer"}, func(x *matrixCell) *lockpb.Request {
		return acquireOf(x.session, x.free, backend.NewRequestID(), true)
	}},
	"acquire_all": {[]string{"acquirer", "peer"}, func(x *matrixCell) *lockpb.Request {
		var all []*lockpb.Acquire
		for _, name := range []string{x.free, x.free + "/more"} {
			all = append(all, acquireOf(nil, name, backend.NewRequestID(), true).GetAcquire())
		}
		return &lockpb.Request{
			Session: x.session, Call: &lockpb.Request_AcquireAll{AcquireAll: &lockpb.AcquireAll{Requests: all}},
		}
	}},
	// What another principal has is that principal's, whatever the rules.
	"cancel_wait": {[]string{"peer"}, func(x *matrixCell) *lockpb.Request { return cancelOf(x.session, x.name, x.id) }},
	"release": {[]string{"peer"}, func(x *matrixCell) *lockpb.Request {
		return releaseOf(nil, x.name, x.id, x.token)
	}},
	"move": {[]string{"peer"}, func(x *matrixCell) *lockpb.Request { return moveOf(x.session, x.name, x.id) }},

	"force_release": {[]string{"forcer", "peer"}, func(x *matrixCell) *lockpb.Request { return forceOf(x.name) }},
	"get_holder": {[]string{"reader", "peer", "auditor"}, func(x *matrixCell) *lockpb.Request {
		return holderOf(x.name)
	}},
	"watch": {[]string{"reader", "peer", "auditor"}, func(x *matrixCell) *lockpb.Request {
		return watchOf(x.name, false, 0)
	}},
	// Who may not read a name gets a list without it.
	"list": {nil, func(x *matrixCell) *lockpb.Request { return listOf(x.name, "", 0) }},
	"unwatch": {nil, func(*matrixCell) *lockpb.Request {
		return &lockpb.Request{Call: &lockpb.Request_Unwatch{Unwatch: &lockpb.Unwatch{}}}
	}},
}

// Each call over gRPC is for those whom the rules allow it, and does nothing for everybody else. A call without a row
// fails.
func TestRulesMatrix(t *testing.T) {
	t.Parallel()
	s := startRuled(t, matrixRules)
	peer := s.as("peer")
	mine := peer.open(longTTL)
	fields := (&lockpb.Request{}).ProtoReflect().Descriptor().Oneofs().ByName("call").Fields()
	if fields.Len() != len(rulesMatrix) {
		t.Errorf("%d calls, %d rows", fields.Len(), len(rulesMatrix))
	}
	readers := []string{"reader", "peer", "auditor"}
	try := func(c *client, who, what, other string, may, reads bool) {
		row := rulesMatrix[what]
		x := &matrixCell{
			name: "a/held/" + what + "/" + who + ".", free: "a/free/" + what + "/" + who + ".", session: c.open(longTTL),
		}
		x.id, x.token = peer.hold(mine, x.name)
		q := row.call(x)
		q.OnBehalfOf = other
		r := c.call(q)
		if denied := codeOf(r) == lockpb.Code_CODE_DENIED; denied == may {
			t.Errorf("%s by %q: %v", what, who, r)
		}
		if !reads && strings.Contains(r.String(), "somebody") {
			t.Errorf("%s shows %q who holds what: %v", what, who, r)
		}
		if what == "list" && reads != (len(r.GetNames().GetNames()) == 1) {
			t.Errorf("the list of %q: %v", who, r)
		}
		if may && row.may != nil {
			return
		}
		if held := s.replica.State.Machine.Look(x.name).Holders; len(held) != 1 || uint64(held[0].Token) != x.token {
			t.Errorf("%s by %q changed who holds the lock: %+v", what, who, held)
		}
		if held := s.replica.State.Machine.Look(x.free).Holders; len(held) != 0 {
			t.Errorf("%s by %q took a lock: %+v", what, who, held)
		}
	}
	// Who asks for others: with the right to, without it, without a credential, and with each right but that one.
	gateways := map[string]*client{}
	for _, name := range []string{"gateway", "admin", "peer", ""} {
		gateways[name] = s.as(name)
	}
	for _, name := range matrixCallers {
		c := s.as(name)
		who := "address:192.0.2.1"
		if name != "" {
			who = "cert:" + name
		}
		for i := range fields.Len() {
			what := string(fields.Get(i).Name())
			row, found := rulesMatrix[what]
			if !found {
				t.Errorf("the call %s has no row", what)
				continue
			}
			may := row.may == nil || slices.Contains(row.may, name)
			try(c, name, what, "", may, slices.Contains(readers, name))
			forwarded := slices.Contains(forwardedCalls, what)
			for gateway, c := range gateways {
				if gateway != "gateway" && !forwarded && what != "force_release" {
					continue
				}
				proxies := gateway == "gateway" || gateway == "admin"
				mayFor := row.may == nil || may && proxies && forwarded
				try(c, gateway+" for "+who, what, who, mayFor, proxies && slices.Contains(readers, name))
			}
		}
	}
	for _, other := range []string{"process:", "socket:", "group:all", "*", "cert:", "peer", "address:",
		"token:" + strings.Repeat("x", 256)} {
		q := holderOf("a/held")
		q.OnBehalfOf = other
		if r := gateways["gateway"].call(q); codeOf(r) != lockpb.Code_CODE_INVALID || r.GetError().Field != "on_behalf_of" {
			t.Errorf("for %q: %v", other, r)
		}
	}
}

// At the socket for clients, operators' calls that show all names need the right to read all of them. At the
// listener for operators everything takes the right admin, except at the socket in the data directory.
func TestRulesOfOperators(t *testing.T) {
	t.Parallel()
	s := startRuled(t, matrixRules)
	for _, name := range matrixCallers {
		at := s.admin(name, s.Addr().String())
		_, err := at.Status(t.Context(), &lockpb.StatusRequest{})
		if err != nil {
			t.Errorf("the status for %q: %v", name, err)
		}
		ctx := t.Context()
		for what, ask := range map[string]func() error{
			"explain": func() error { _, err := at.Explain(ctx, &lockpb.ExplainRequest{Name: "a"}); return err },
			"look":    func() error { _, err := at.LookStale(ctx, &lockpb.LookStaleRequest{Name: "a"}); return err },
			"sessions": func() error {
				stream, err := at.ListSessions(ctx, &lockpb.ListSessionsRequest{})
				if err == nil {
					_, err = stream.Recv()
				}
				return err
			},
		} {
			err := ask()
			if denied := status.Code(err) == codes.PermissionDenied; denied == (name == "auditor") {
				t.Errorf("%s for %q: %v", what, name, err)
			}
		}
		if name == "" {
			continue // it gets no connection
		}
		_, err = s.admin(name, s.AdminAddr()).GetRules(ctx, &lockpb.GetRulesRequest{})
		if denied := status.Code(err) == codes.PermissionDenied; denied == (name == "admin") {
			t.Errorf("the rules for %q: %v", name, err)
		}
	}
}

// Rules that operators set are in force at once, on every member, and outlast restarts. The first rules of a
// configuration do not replace them.
func TestRulesAreSet(t *testing.T) {
	t.Parallel()
	config := Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Rules: "allow * acquire,read first\n"}
	s := alone(t, config)
	eventually(t, "the rules are in force", s.Ruled)
	c := dial(t, s.Addr().String())
	session := c.open(longTTL)
	c.hold(session, "first")
	wait := acquireOf(c.open(2*longTTL), "first", backend.NewRequestID(), true)
	if r := c.call(wait); !r.GetAcquired().GetQueued() {
		t.Fatal(r)
	}
	operator := operate(t, s.AdminAddr())
	_, err := operator.SetRules(t.Context(), &lockpb.SetRulesRequest{Text: "allow * acquire\n"})
	expectCode(t, err, codes.InvalidArgument, `line 1: "acquire": the prefix is missing`)
	const text = "allow * acquire second\n"
	set, err := operator.SetRules(t.Context(), &lockpb.SetRulesRequest{Text: text})
	if err != nil || set.GetText() != text || set.GetVersion() != 2 {
		t.Fatalf("set: %v, %v", set, err)
	}
	if lost := c.next().GetLost(); lost.GetName() != "first" || lost.GetRequestId() != wait.GetAcquire().RequestId ||
		lost.Token != 0 {
		t.Errorf("the wait: %v", lost)
	}
	if r := c.call(acquireOf(session, "first/other", backend.NewRequestID(), false)); codeOf(r) != lockpb.Code_CODE_DENIED ||
		!strings.Contains(r.GetError().Message, `may not acquire "first/other": no rule allows it`) {
		t.Errorf("by the new rules: %v", r)
	}
	if r := c.call(holderOf("first")); codeOf(r) != lockpb.Code_CODE_DENIED {
		t.Errorf("by the new rules: %v", r)
	}
	if r := c.call(keepAliveOf(session)); !r.Renewed {
		t.Errorf("what was granted before: %v", r)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	again := alone(t, config)
	if got, err := operate(t, again.AdminAddr()).GetRules(t.Context(), &lockpb.GetRulesRequest{}); err != nil ||
		got.GetText() != text || got.GetVersion() != 2 {
		t.Errorf("after a restart: %v, %v", got, err)
	}
}

// While a member may not support rules, setting them is an error.
func TestRulesNeedTheirLevel(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{
		DataDir: t.TempDir(), Listen: "127.0.0.1:0", Rules: "deny * acquire a\n", Rig: &serverfault.Rig{Level: machine.LevelRules - 1},
	})
	eventually(t, "the level is raised", func() bool { return s.level() == machine.LevelRules-1 })
	c := dial(t, s.Addr().String())
	c.hold(c.open(longTTL), "a")
	_, err := operate(t, s.AdminAddr()).SetRules(t.Context(), &lockpb.SetRulesRequest{Text: "deny * acquire a\n"})
	expectCode(t, err, codes.FailedPrecondition, "without rules")
}

// What shows several names shows those that the client may read, and a refusal names the holder to nobody else.
func TestRulesFilterWhatIsShown(t *testing.T) {
	t.Parallel()
	const text = "allow cert:blind acquire \"\"\nallow cert:seer acquire,read a\nallow cert:seer acquire b\n" +
		"deny cert:seer read a/secret\n"
	s := startRuled(t, text)
	seer, blind := s.as("seer"), s.as("blind")
	if r := seer.call(watchOf("", true, 0)); r.GetWatching() == nil {
		t.Fatal(r)
	}
	if r := blind.call(watchOf("", true, 0)); codeOf(r) != lockpb.Code_CODE_DENIED {
		t.Errorf("a watch by a client that may read nothing: %v", r)
	}
	session := blind.open(longTTL)
	for _, name := range []string{"a/1", "a/2", "a/secret", "a/z", "b"} {
		blind.hold(session, name)
	}
	var names []string
	for after := ""; ; {
		r := seer.call(listOf("", after, 1)).GetNames()
		for _, n := range r.GetNames() {
			names = append(names, n.Name)
		}
		if after = r.GetNextAfter(); after == "" {
			break
		}
	}
	if got := strings.Join(names, " "); got != "a/1 a/2 a/z" {
		t.Errorf("the list: %q", got)
	}
	var seen []string
	for len(seen) < 3 {
		for _, e := range seer.next().GetEvents().GetEvents() {
			seen = append(seen, e.Name)
		}
	}
	if got := strings.Join(seen, " "); got != "a/1 a/2 a/z" {
		t.Errorf("the watch: %q", got)
	}
	own := seer.open(longTTL)
	for name, shown := range map[string]bool{"a/1": true, "b": false} {
		e := seer.call(acquireOf(own, name, backend.NewRequestID(), false)).GetError()
		if e.GetCode() != lockpb.Code_CODE_HELD || (e.Holder == "somebody") != shown || !shown && e.HoldId != "" {
			t.Errorf("%s: %v", name, e)
		}
	}
}

// Under rules the HTTP server of a member asks for its clients alone, and without rules for itself as well. A watch of one
// name ends when new rules deny it to the one for whom it is.
func TestDoorAsksForItsClients(t *testing.T) {
	t.Parallel()
	const text = "allow cert:ann acquire,read a\n"
	s := alone(t, Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0"})
	door := newClient(t, s.AttachDoor(t.Context(), "http"), func() {})
	session := door.open(longTTL)
	door.hold(session, "before")
	operator := operate(t, s.AdminAddr())
	set := func(text string) {
		t.Helper()
		if _, err := operator.SetRules(t.Context(), &lockpb.SetRulesRequest{Text: text}); err != nil {
			t.Fatal(err)
		}
	}
	set(text)
	all := []*lockpb.Request{
		acquireOf(session, "a", backend.NewRequestID(), false), holderOf("a"), listOf("", "", 0), forceOf("before"),
		watchOf("a", false, 0),
	}
	for _, q := range all {
		if r := door.call(q); codeOf(r) != lockpb.Code_CODE_DENIED {
			t.Errorf("for itself, %v: %v", q, r)
		}
	}
	for _, q := range all[:3] {
		q.OnBehalfOf = "cert:ann"
		if r := door.call(q); codeOf(r) != lockpb.Code_CODE_UNSPECIFIED {
			t.Errorf("for a client, %v: %v", q, r)
		}
	}
	watch := watchOf("a", false, 0)
	watch.OnBehalfOf = "cert:ann"
	number := door.call(watch).GetNumber()
	set("allow cert:ann acquire a\n")
	if e := door.next().GetEvents(); e.GetWatch() != number || e.GetError().GetCode() != lockpb.Code_CODE_DENIED {
		t.Errorf("the watch goes on with %v", e)
	}
}

// The socket in the data directory needs no right, so that rules shut nobody out.
func TestSocketNeedsNoRight(t *testing.T) {
	t.Parallel()
	s := alone(t, Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Rules: "deny * admin \"\"\n"})
	eventually(t, "the rules are in force", s.Ruled)
	if _, err := operate(t, s.AdminAddr()).SetRules(t.Context(), &lockpb.SetRulesRequest{}); err != nil || s.Ruled() {
		t.Errorf("%v, rules: %v", err, s.Ruled())
	}
	_, err := lockpb.NewAdminServiceClient(grpcTo(t, s.Addr().String(), insecure.NewCredentials())).
		SetRules(t.Context(), &lockpb.SetRulesRequest{})
	expectCode(t, err, codes.PermissionDenied, s.AdminAddr())
}
