package replica

// The timeouts between members, and their checks.

import (
	"fmt"
	"time"
)

// ConfigError describes an invalid setting.
type ConfigError struct {
	Setting, Value, Why string
}

func (e *ConfigError) Error() string { return fmt.Sprintf("%s %q: %s", e.Setting, e.Value, e.Why) }

// Timing has the timeouts between members. Zero values mean the defaults, which suit members in one region.
type Timing struct {
	// Heartbeat is the time without a message of the leader after which a member stands for election. The default is 500
	// ms.
	Heartbeat time.Duration
	// Lease is the time without contact with most members after which a leader steps down. It is at most Heartbeat, which
	// is the default. With a shorter lease an isolated leader disconnects its clients sooner, and leaders on busy machines
	// change more often. No promise to clients depends on it.
	Lease time.Duration
	// Election is the time for which a candidate waits for votes before it tries again. It is at least Heartbeat, which is
	// the default.
	Election time.Duration
	// Commit is the maximum time until followers get the commit index if there are no further writes. The default is 50
	// ms.
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

// Check returns an error if t is invalid, or too slow for minTTL. All fields of t must be set.
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
	// Members wait for a random time of up to twice these times, so that they do not all stand for election at the same
	// time.
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
