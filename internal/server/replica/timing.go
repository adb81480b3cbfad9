package replica

// The members' timeouts, and their consistency.

import (
	"fmt"
	"time"
)

// ConfigError describes an invalid setting.
type ConfigError struct {
	Setting, Value, Why string
}

func (e *ConfigError) Error() string { return fmt.Sprintf("%s %q: %s", e.Setting, e.Value, e.Why) }

// Timing sets the members' timeouts towards each other. Zero values mean the defaults, which suit members within one
// region.
type Timing struct {
	// Heartbeat is the time without a message of the leader after which a member stands for election. Default 500 ms.
	Heartbeat time.Duration
	// Lease is the time without contact to most members after which a leader steps down; at most Heartbeat, the
	// default. A shorter one makes an isolated leader disconnect its clients sooner, and a busy machine change
	// leaders more often. No promise to clients rests on it.
	Lease time.Duration
	// Election is the time for which a candidate waits for votes before it tries again; at least Heartbeat, the
	// default.
	Election time.Duration
	// Commit is the maximum time until followers learn the commit index without further writes. Default 50 ms.
	Commit time.Duration
}

const (
	defaultHeartbeat = 500 * time.Millisecond
	defaultCommit    = 50 * time.Millisecond
)

// WithDefaults returns t with a value for each field.
func (t Timing) WithDefaults() Timing {
	if t.Heartbeat == 0 {
		t.Heartbeat = defaultHeartbeat
	}
	if t.Lease == 0 {
		t.Lease = t.Heartbeat
	}
	if t.Election == 0 {
		t.Election = t.Heartbeat
	}
	if t.Commit == 0 {
		t.Commit = defaultCommit
	}
	return t
}

// Check returns the first error in t, which has its defaults.
func (t Timing) Check(minTTL time.Duration) error {
	const slowest = 10 * time.Second
	switch {
	case t.Heartbeat < 10*time.Millisecond || t.Heartbeat > slowest:
		return &ConfigError{"Timing.Heartbeat", t.Heartbeat.String(), "it is not between 10ms and 10s"}
	case t.Lease < 5*time.Millisecond || t.Lease > t.Heartbeat:
		return &ConfigError{"Timing.Lease", t.Lease.String(), "it is not between 5ms and Heartbeat"}
	case t.Election < t.Heartbeat || t.Election > slowest:
		return &ConfigError{"Timing.Election", t.Election.String(), "it is not between Heartbeat and 10s"}
	case t.Commit < time.Millisecond || t.Commit > t.Heartbeat:
		return &ConfigError{"Timing.Commit", t.Commit.String(), "it is not between 1ms and Heartbeat"}
	}
	// Members wait for up to twice these times, so that not all of them stand at once.
	election := 2 * (t.Heartbeat + t.Election)
	if slow := max(t.Heartbeat, t.Election) > defaultHeartbeat; slow && minTTL < election {
		return &ConfigError{
			"MinTTL", minTTL.String(),
			fmt.Sprintf("with this Timing an election takes up to %v, in which holds with a shorter TTL would be lost",
				election),
		}
	}
	return nil
}
