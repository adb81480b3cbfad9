package server

// Settings and their defaults. resolve checks them before the server opens anything, so that a wrong setting leaves
// no files or listeners behind.

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/audit"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/principal"
	"github.com/fencelock/fencelock/internal/rules"
	"github.com/fencelock/fencelock/internal/server/lead"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// Config configures a server. The zero value is one node in memory that only this process reaches.
type Config struct {
	// DataDir keeps the log, the snapshots and the name of this member. Empty: the server has no disk storage, and
	// reports that it is not durable.
	DataDir string
	// Moved permits a DataDir that is a copy, provided that the server of the original never starts again. Without it
	// a copy is a *replica.CopiedError.
	Moved bool
	// Store is the kind of log in DataDir: replica.StoreWAL (the default) or replica.StoreBolt. It cannot be changed
	// later.
	Store replica.Store

	// Listen is the address for clients, host:port. Empty: only Attach reaches the server. Advertise is the address that
	// clients use, if it differs.
	Listen, Advertise string
	// PeerListen is the address for the other members, host:port. Empty: no other members. PeerAdvertise is the address
	// by which they know this member, as in their Join.
	PeerListen, PeerAdvertise string

	// AdminListen is the address for operators, who change the cluster: unix:PATH, a socket that only the user of the
	// process can open; host:port, with AdminTLS; or none. Default: unix:DataDir/admin.sock if there are DataDir and
	// Listen, else none.
	AdminListen string
	// AdminTLS is for operators over TCP. It must require and verify their certificates: an operator with a certificate
	// may do everything.
	AdminTLS *tls.Config

	// PeerDial opens connections to the other members, by the addresses that they advertise. Default TCP.
	PeerDial func(ctx context.Context, address string) (net.Conn, error) `json:"-"`

	// Join lists the peer addresses of the members; this one may be among them. A member without a cluster asks them
	// to add it.
	Join []string
	// JoinKey, of at least MinJoinKey bytes, is shared by all members and approves new members that have it. Nil: an
	// operator approves each, see AddMember in lockpb.AdminService: until then it has no vote.
	JoinKey []byte
	// BootstrapExpect is the number of members in Join, this one included, if they are to make a new cluster once all
	// of them are there. Give all of them the same Join. 0: the member only joins an existing cluster.
	BootstrapExpect int

	// TLS is for clients, PeerTLS for members, in both directions, so it needs certificates for both.
	TLS, PeerTLS *tls.Config
	// Insecure permits addresses beyond loopback without TLS.
	Insecure bool

	// MinTTL and MaxTTL bound the TTLs of sessions while this member leads. Defaults: 3 s, which outlasts an election,
	// and 1 h, or 24 h in a cluster that a version before 0.1 made. A restored cluster does not serve for the greatest
	// MaxTTL.
	MinTTL, MaxTTL time.Duration
	// Limits bound the state of the cluster. A zero field has its value of machine.DefaultLimits. The leader's limits
	// apply: give all members the same. State over a limit stays when the limit is lowered.
	Limits machine.Limits
	// Rules are a file of package rules: the first rules of the cluster, until operators set others. They name clients
	// with certificates as lists of sessions do. Give all members the same. Empty: no rules, and every client may do
	// everything.
	Rules string
	// Proofs returns the principals of tokens. The server calls it for each connection, when it opens and repeatedly
	// while it lasts. It needs TLS. Its certificates are ignored: clients with certificates are known by their names.
	// Nil: no token is valid.
	Proofs func() *principal.Proofs `json:"-"`
	// Timing of the members among themselves. Give all of them the same.
	Timing replica.Timing

	// hangAfter replaces the constant, for tests that hang a server.
	hangAfter time.Duration
	// files replaces the limit of open files, for tests of too many connections.
	files int
	// compareEvery replaces the constant, for tests of divergent states.
	compareEvery time.Duration
	// healthEvery replaces the constant, for tests of members that do not follow.
	healthEvery time.Duration
	// rivalsEvery replaces the constant, for tests of two generations.
	rivalsEvery time.Duration
	// askTime replaces the constants, for tests of other members' answers to a starting member.
	askTime time.Duration
	// unreadTime replaces the constant, for tests of clients that do not read.
	unreadTime time.Duration
	// Rig is for the tests of this module; only they can make one.
	Rig *serverfault.Rig `json:"-"`

	// Meter gets a leader's counts, and Appended the time of each append to the log, with its fsync. They must not
	// block. Nil: no counting.
	Meter    lead.Meter          `json:"-"`
	Appended func(time.Duration) `json:"-"`

	// Audit gets the audit events. The owner closes it, after the server. Nil: no audit log.
	Audit *audit.Log `json:"-"`

	// Version is shown to clients, for people.
	Version string
	// Log receives the server's log. Default: slog.Default.
	Log *slog.Logger
}

// MinJoinKey is the minimum length of Config.JoinKey, in bytes.
const MinJoinKey = 16

// Defaults of Config.
const (
	DefaultMinTTL = 3 * time.Second
	DefaultMaxTTL = replica.DefaultMaxTTL // of a new cluster
)

// resolve returns c with its defaults, or the first error in it.
func (c Config) resolve() (Config, error) {
	if c.MinTTL == 0 {
		c.MinTTL = DefaultMinTTL
	}
	c.Limits = c.Limits.WithDefaults()
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.PeerDial == nil {
		c.PeerDial = dialTCP
	}
	if c.Store == "" {
		c.Store = replica.StoreWAL
	}
	if c.DataDir == "" {
		c.Store = replica.StoreMemory
	}
	for _, check := range []func() error{c.checkStore, c.checkTimes, c.checkLimits, c.checkRules, c.checkProofs,
		c.checkAddresses, c.checkAdmin, c.checkJoin} {
		if err := check(); err != nil {
			return c, err
		}
	}
	return c, nil
}

// rig is never nil.
func (c *Config) rig() *serverfault.Rig {
	if c.Rig == nil {
		return &serverfault.Rig{}
	}
	return c.Rig
}

// now reads the clock. Its date is only for people; durations use its monotonic part.
func (c *Config) now() time.Time {
	if now := c.rig().Now; now != nil {
		return now()
	}
	return time.Now()
}

func dialTCP(ctx context.Context, address string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", address)
}

func mistake(setting, value, why string) error {
	return &replica.ConfigError{Setting: setting, Value: value, Why: why}
}

func (c *Config) checkStore() error {
	if c.DataDir != "" && c.Store != replica.StoreWAL && c.Store != replica.StoreBolt {
		return mistake("Store", string(c.Store), "want wal or bolt")
	}
	return nil
}

func (c *Config) checkTimes() error {
	switch {
	case c.MinTTL <= 0:
		return mistake("MinTTL", c.MinTTL.String(), "it is not positive")
	case cmp.Or(c.MaxTTL, DefaultMaxTTL) < c.MinTTL:
		return mistake("MaxTTL", cmp.Or(c.MaxTTL, DefaultMaxTTL).String(), "it is less than MinTTL")
	}
	return c.Timing.WithDefaults().Check(c.MinTTL)
}

func (c *Config) checkLimits() error {
	if l, wrong := c.Limits.Wrong(); wrong {
		return mistake("Limits."+l.Field, fmt.Sprint(*l.Value), fmt.Sprintf("it is not between 1 and %d", l.Most))
	}
	return nil
}

// identified reports whether clients have principals.
func (c *Config) identified() bool {
	settings := c.TLS
	if settings != nil && settings.GetConfigForClient != nil {
		if now, err := settings.GetConfigForClient(&tls.ClientHelloInfo{}); err == nil && now != nil {
			settings = now
		}
	}
	return c.Proofs != nil || settings != nil && settings.ClientAuth >= tls.VerifyClientCertIfGiven
}

func (c *Config) checkRules() error {
	if _, err := rules.Parse([]byte(c.Rules)); err != nil {
		return mistake("Rules", fmt.Sprint(len(c.Rules))+" bytes", err.Error())
	}
	if n := len(c.Rules); n > machine.MaxRulesBytes {
		return mistake("Rules", fmt.Sprint(n)+" bytes", fmt.Sprintf("want at most %d", machine.MaxRulesBytes))
	}
	return nil
}

// checkProofs refuses tokens in the clear.
func (c *Config) checkProofs() error {
	if c.Proofs != nil && c.TLS == nil {
		return mistake("Proofs", "of tokens", "tokens must not be sent unencrypted: set TLS")
	}
	return nil
}

// checkAddresses refuses addresses that others reach without TLS, unless Insecure permits them: clients need no
// credentials, so any client that reaches such an address can acquire and break every lock.
func (c *Config) checkAddresses() error {
	for _, a := range []struct {
		setting, address string
		secure           bool
	}{
		{"Listen", c.Listen, c.TLS != nil}, {"PeerListen", c.PeerListen, c.PeerTLS != nil},
	} {
		if a.address == "" {
			continue
		}
		host, _, err := net.SplitHostPort(a.address)
		if err != nil {
			return mistake(a.setting, a.address, err.Error())
		}
		if !a.secure && !c.Insecure && !loopback(host) {
			return mistake(a.setting, a.address, "other machines can connect to it, and without TLS every client may "+
				"acquire and force-release every lock; set certificates, or Insecure")
		}
	}
	return nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// checkJoin checks that Join and BootstrapExpect agree, since the cluster is made only once all of its members
// answer.
func (c *Config) checkJoin() error {
	if n := len(c.JoinKey); n > 0 && n < MinJoinKey {
		return mistake("JoinKey", fmt.Sprint(n)+" bytes", fmt.Sprintf("it needs at least %d", MinJoinKey))
	}
	if len(c.Join) == 0 && c.BootstrapExpect == 0 {
		return nil
	}
	join := fmt.Sprint(c.Join)
	if c.PeerListen == "" {
		return mistake("Join", join, "PeerListen is missing: the members could not connect to this one")
	}
	seen := map[string]bool{}
	for _, address := range c.Join {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return mistake("Join", join, err.Error())
		}
		if seen[address] {
			return mistake("Join", join, "duplicate address "+address)
		}
		seen[address] = true
	}
	members := len(c.Join)
	if !slices.Contains(c.Join, c.peerAddress()) {
		members++
	}
	if c.BootstrapExpect != 0 && c.BootstrapExpect != members {
		return mistake("BootstrapExpect", fmt.Sprint(c.BootstrapExpect),
			fmt.Sprintf("with this one, at %s, Join %s names %d members",
				c.peerAddress(), strings.Join(c.Join, ","), members))
	}
	return nil
}

// peerAddress returns the address by which the others know this member, before it listens.
func (c *Config) peerAddress() string {
	if c.PeerAdvertise != "" {
		return c.PeerAdvertise
	}
	return c.PeerListen
}
