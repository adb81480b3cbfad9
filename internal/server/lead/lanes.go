package lead

// lanes are the commands that wait for the log: a lane for each connection with waiting commands, and a lane for the
// server itself. The lanes take turns, one command at a time. So a command waits for at most one command of each other
// connection before its lane's turn, not for all the commands that others have sent. Commands in one lane stay in
// order; between lanes there is no order, as between connections.
type lanes struct {
	all    map[Listener]*lane
	last   *lane // the last lane of a ring of nonempty lanes: its after is the first
	queued int   // in all lanes
}

type lane struct {
	by    Listener   // nil: the server itself
	queue []Proposal // never empty
	after *lane      // the lane with the next turn
}

// add adds a command, or returns false if there are too many. It never refuses a command for a lane with few commands,
// so that a connection with many commands does not block others.
func (l *lanes) add(x Proposal) bool {
	own := l.all[x.By]
	if own == nil {
		if l.all == nil {
			l.all = map[Listener]*lane{}
		}
		own = &lane{by: x.By}
		l.all[x.By] = own
		l.append(own)
	} else if l.queued >= maxQueued && len(own.queue) >= fewQueued {
		return false
	}
	own.queue = append(own.queue, x)
	l.queued++
	return true
}

// append puts a lane at the end of the ring: all other lanes have their turn before it.
func (l *lanes) append(own *lane) {
	if own.after = own; l.last != nil {
		own.after, l.last.after = l.last.after, own
	}
	l.last = own
}

// next returns the next command, or nil.
func (l *lanes) next() *Proposal {
	if l.last == nil {
		return nil
	}
	return &l.last.after.queue[0]
}

// pop removes the next command, and passes the turn to the next lane.
func (l *lanes) pop() {
	own := l.last.after
	l.queued--
	own.queue[0] = Proposal{} // free the memory that it refers to
	own.queue = own.queue[1:]
	switch {
	case len(own.queue) > 0:
		l.last = own
	case l.last == own:
		delete(l.all, own.by)
		l.last = nil
	default:
		delete(l.all, own.by)
		l.last.after = own.after
	}
}

// obsoleteProposal is a proposal that must no longer go into the log, with the reason.
type obsoleteProposal struct {
	Proposal
	why error
}

// take removes the commands for the next log entry, and obsolete commands. It is the last check before the log, because
// a command may have waited for a long time.
func (l *lanes) take() (batch []Proposal, obsolete []obsoleteProposal) {
	size := 0
	for len(batch) < maxBatch {
		x := l.next()
		if x == nil {
			break
		}
		if x.Obsolete != nil {
			if why := x.Obsolete(); why != nil {
				obsolete = append(obsolete, obsoleteProposal{*x, why})
				l.pop()
				continue
			}
		}
		if size += Weight(&x.Command); len(batch) > 0 && size > maxBatchBytes {
			break
		}
		batch = append(batch, *x)
		l.pop()
	}
	return batch, obsolete
}

// drain removes and returns all commands.
func (l *lanes) drain() (all []Proposal) {
	for x := l.next(); x != nil; x = l.next() {
		all = append(all, *x)
		l.pop()
	}
	return all
}
