package server

// Settings, their defaults, and what is wrong with them. resolve looks for mistakes before anything is opened, so that
// a wrong setting leaves nothing behind.

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/rig"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Config says what kind of server to start. The zero value is one node in memory that only this process reaches.
type Config struct {
	// DataDir keeps the log, the snapshots and the name of this member. Empty: nothing is kept, and the server says
	// that it is not durable.
	DataDir string
	// Store is the kind of log in DataDir: replica.StoreWAL (the default) or replica.StoreBolt. It cannot be changed
	// later.
	Store replica.Store

	// Listen is where clients connect, host:port. Empty: only Attach reaches the server. Advertise is what clients are
	// told instead, if they reach the server under another name.
	Listen, Advertise string
	// PeerListen is where the other members connect, host:port. Empty: there are none. PeerAdvertise is the address by
	// which they know this member; it is the one that stands in their Join.
	PeerListen, PeerAdvertise string

	// PeerDial opens connections to the other members, by the addresses that they advertise. Default TCP.
	PeerDial func(ctx context.Context, address string) (net.Conn, error) `json:"-"`

	// Join lists the peer addresses of the members; this one may be among them. A member that belongs to no cluster
	// asks them to take it in.
	Join []string
	// JoinKey, at least MinJoinKey bytes that all members share, approves new members that have it too. Nil: each is
	// approved by an operator, see AddMember in lockpb.AdminService: until then it has no vote.
	JoinKey []byte
	// BootstrapExpect is the number of members in Join, this one included, if they are to make a new cluster once all
	// of them are there. All of them are given the same Join. 0: only an existing cluster is joined.
	BootstrapExpect int

	// TLS is for clients, PeerTLS for members, in both directions, so it needs certificates of both sorts.
	TLS, PeerTLS *tls.Config
	// Insecure permits addresses beyond loopback without TLS.
	Insecure bool

	// MinTTL and MaxTTL bound the TTLs of sessions. Defaults: 3 s, which outlasts an election, and 24 h.
	MinTTL, MaxTTL time.Duration
	// Limits bound what the cluster takes on. A field that is zero has its value of machine.DefaultLimits. The members
	// agree on those of the one that leads: give all of them the same. What is over a limit when it is lowered stays.
	Limits machine.Limits
	// Timing of the members among themselves. Give all of them the same.
	Timing replica.Timing

	// hangAfter replaces the constant, for tests that hang a server.
	hangAfter time.Duration
	// files replaces how many files the process may open, for tests of too many connections.
	files int
	// compareEvery replaces the constant, for tests of states that differ.
	compareEvery time.Duration
	// unreadTime replaces the constant, for tests of clients that do not read.
	unreadTime time.Duration
	// Rig is for the tests of this module, which alone can make one.
	Rig *rig.Rig `json:"-"`

	// Version is told to clients, for people.
	Version string
	// Log is where the server tells what it does. Default: slog.Default.
	Log *slog.Logger
}

// MinJoinKey is the least length of Config.JoinKey, in bytes.
const MinJoinKey = 16

// Defaults of Config.
const (
	DefaultMinTTL = 3 * time.Second
	DefaultMaxTTL = replica.DefaultMaxTTL
)

// resolve returns c with its defaults, or the first thing that is wrong.
func (c Config) resolve() (Config, error) {
	if c.MinTTL == 0 {
		c.MinTTL = DefaultMinTTL
	}
	if c.MaxTTL == 0 {
		c.MaxTTL = DefaultMaxTTL
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
	for _, check := range []func() error{c.checkStore, c.checkTimes, c.checkLimits, c.checkAddresses, c.checkJoin} {
		if err := check(); err != nil {
			return c, err
		}
	}
	return c, nil
}

// rig is never nil.
func (c *Config) rig() *rig.Rig {
	if c.Rig == nil {
		return &rig.Rig{}
	}
	return c.Rig
}

// now reads the clock. Only what people read is made of its date; lengths of time are measured by its monotonic part.
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
	case c.MaxTTL < c.MinTTL:
		return mistake("MaxTTL", c.MaxTTL.String(), "it is less than MinTTL")
	}
	return c.Timing.WithDefaults().Check(c.MinTTL)
}

func (c *Config) checkLimits() error {
	if l, wrong := c.Limits.Wrong(); wrong {
		return mistake("Limits."+l.Field, fmt.Sprint(*l.Value), fmt.Sprintf("it is not between 1 and %d", l.Most))
	}
	return nil
}

// checkAddresses refuses addresses that others reach without TLS, unless Insecure says that it is meant so: there are
// no roles beneath, so a stranger who reaches such an address takes and breaks every lock.
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
			return mistake(a.setting, a.address, "it is reachable by others, and without TLS whoever reaches it takes "+
				"and breaks every lock; give certificates, or say that it is meant so")
		}
	}
	return nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// checkJoin sees that Join and BootstrapExpect agree, since the cluster is made only once all of its members are there.
func (c *Config) checkJoin() error {
	if n := len(c.JoinKey); n > 0 && n < MinJoinKey {
		return mistake("JoinKey", "of so many bytes: "+fmt.Sprint(n), fmt.Sprintf("it needs at least %d", MinJoinKey))
	}
	if len(c.Join) == 0 && c.BootstrapExpect == 0 {
		return nil
	}
	join := fmt.Sprint(c.Join)
	if c.PeerListen == "" {
		return mistake("Join", join, "without PeerListen the members cannot reach this one")
	}
	seen := map[string]bool{}
	for _, address := range c.Join {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return mistake("Join", join, err.Error())
		}
		if seen[address] {
			return mistake("Join", join, address+" is there twice")
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

// peerAddress is the address by which the others know this member, as far as it is known before listening.
func (c *Config) peerAddress() string {
	if c.PeerAdvertise != "" {
		return c.PeerAdvertise
	}
	return c.PeerListen
}
