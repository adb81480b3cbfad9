package machine

// Limits bound the state of a machine. Beyond a limit, the answer is CodeLimit with the name of the field. All are
// positive and at most 1<<30. They are checked when a command arrives; a grant to a waiter is never refused.
type Limits struct {
	Sessions       int // open at a time
	Holds          int // of all sessions together, lingering ones too
	Waits          int // of all sessions together
	WaitersPerName int // places in one queue; requests that pass through an ancestor count there too
	Unacked        int // remembered results of one session
	Requests       int // in one acquire
	NameBytes      int // of a name; at most 512
	Levels         int // of a hierarchical name: 1 + its ancestors
	MetadataBytes  int // of one request, keys and values together
	DeadlockSteps  int // names, holders and waiters that one search for a deadlock visits
	// ClientShare is the share of Sessions, Holds and Waits that the sessions of one client may take together, in
	// hundredths, at least one of each; at most 100. See Command.Client. From LevelDeadlines.
	ClientShare int
}

// DefaultLimits are in force until OpSetLimits.
func DefaultLimits() Limits {
	return Limits{
		Sessions:       100_000,
		Holds:          1_000_000,
		Waits:          1_000_000,
		WaitersPerName: 10_000,
		Unacked:        10_000,
		Requests:       64,
		NameBytes:      512,
		Levels:         32,
		MetadataBytes:  4096,
		DeadlockSteps:  10_000,
		ClientShare:    25,
	}
}

const maxLimit = 1 << 30

// Limit is one field of Limits.
type Limit struct {
	Name  string // for people, as on the command line: waiters-per-name
	Field string // of Limits, as in Result.Field: WaitersPerName
	Value *int
	Most  int // the maximum of Value; the minimum is 1
}

// All lists the limits in the order in which they are encoded. The values point into l.
func (l *Limits) All() []Limit {
	return []Limit{
		{"sessions", "Sessions", &l.Sessions, maxLimit},
		{"holds", "Holds", &l.Holds, maxLimit},
		{"waits", "Waits", &l.Waits, maxLimit},
		{"waiters-per-name", "WaitersPerName", &l.WaitersPerName, maxLimit},
		{"unacked", "Unacked", &l.Unacked, maxLimit},
		{"requests", "Requests", &l.Requests, maxLimit},
		{"name-bytes", "NameBytes", &l.NameBytes, maxNameBytes},
		{"levels", "Levels", &l.Levels, maxLimit},
		{"metadata-bytes", "MetadataBytes", &l.MetadataBytes, maxLimit},
		{"deadlock-steps", "DeadlockSteps", &l.DeadlockSteps, maxLimit},
		{"client-share", "ClientShare", &l.ClientShare, 100},
	}
}

// firstLevel returns the limits that members of the first level know.
func (l *Limits) firstLevel() []Limit { all := l.All(); return all[:len(all)-1] }

// At returns l with the defaults in place of limits that members of level do not know.
func (l Limits) At(level uint32) Limits {
	if level < LevelDeadlines {
		l.ClientShare = DefaultLimits().ClientShare
	}
	return l
}

// Share returns one client's share of limit.
func (l *Limits) Share(limit int) int { return max(1, limit*l.ClientShare/100) }

// WithDefaults returns l with zero fields taken from DefaultLimits.
func (l Limits) WithDefaults() Limits {
	defaults := DefaultLimits()
	for i, d := range defaults.All() {
		if v := l.All()[i].Value; *v == 0 {
			*v = *d.Value
		}
	}
	return l
}

// Wrong returns the first limit out of its bounds, and false if all are within.
func (l *Limits) Wrong() (Limit, bool) {
	for _, x := range l.All() {
		if *x.Value < 1 || *x.Value > x.Most {
			return x, true
		}
	}
	return Limit{}, false
}
