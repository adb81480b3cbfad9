package lead

// lanes are the commands that wait for the log: one lane for each connection that has some, and one for the server
// itself. They take turns, one command at a time, so that a connection waits for as many commands as there are
// connections and not for as many as the others have sent. Within a lane, commands stay in their order; between lanes
// there is no order, as between connections.
type lanes struct {
	all    map[Listener]*lane
	last   *lane // the nonempty lanes are a ring: after the last one it is the first one's turn
	queued int   // in all of them
}

type lane struct {
	by    Listener   // nil: the server itself
	queue []Proposal // never empty
	after *lane      // whose turn is next
}

// add reports false if there are too many. A lane with few commands is never refused: a flooding connection does not
// block others.
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

// append puts a lane at the end of the ring: all the others have their turn before it.
func (l *lanes) append(own *lane) {
	if own.after = own; l.last != nil {
		own.after, l.last.after = l.last.after, own
	}
	l.last = own
}

// next returns the command whose turn it is, or nil.
func (l *lanes) next() *Proposal {
	if l.last == nil {
		return nil
	}
	return &l.last.after.queue[0]
}

// pop removes the command whose turn it is.
func (l *lanes) pop() {
	own := l.last.after
	l.queued--
	own.queue[0] = Proposal{} // the rest of the lane keeps the memory
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

// obsoleteProposal is a proposal that must not go into the log any more, and why.
type obsoleteProposal struct {
	Proposal
	why error
}

// take removes the commands for the next log entry, and the obsolete ones. It checks that only now, because a command
// may wait in its lane for long.
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

// drain removes everything.
func (l *lanes) drain() (all []Proposal) {
	for x := l.next(); x != nil; x = l.next() {
		all = append(all, *x)
		l.pop()
	}
	return all
}
