package fault

import "time"

// Links are the links of one client to several servers, broken together, as when the client loses its network. Each
// method acts on all of them, one after the other.
type Links []Link

var _ Link = Links(nil)

// Pass implements Link.
func (ls Links) Pass() { ls.each(Link.Pass) }

// Hold implements Link.
func (ls Links) Hold(dir Direction) { ls.each(func(l Link) { l.Hold(dir) }) }

// Drop implements Link.
func (ls Links) Drop(dir Direction) { ls.each(func(l Link) { l.Drop(dir) }) }

// Delay implements Link.
func (ls Links) Delay(dir Direction, d time.Duration) { ls.each(func(l Link) { l.Delay(dir, d) }) }

// Reset implements Link.
func (ls Links) Reset() { ls.each(Link.Reset) }

// Refuse implements Link.
func (ls Links) Refuse() { ls.each(Link.Refuse) }

// Seen implements Link: the sum over all links.
func (ls Links) Seen(dir Direction) int64 {
	var n int64
	ls.each(func(l Link) { n += l.Seen(dir) })
	return n
}

// Severed returns the sum over the links that have this method, as Proxy has.
func (ls Links) Severed() int64 {
	var n int64
	ls.each(func(l Link) {
		if l, ok := l.(interface{ Severed() int64 }); ok {
			n += l.Severed()
		}
	})
	return n
}

func (ls Links) each(act func(Link)) {
	for _, l := range ls {
		act(l)
	}
}
