package conformance

import (
	"time"

	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/conformance/fault"
)

// NetworkLink makes a fault.Link of the network between an in-process driver and its store.
func NetworkLink(d *memory.Driver) fault.Link { return networkLink{d.Network()} }

type networkLink struct{ net *memory.Network }

// direction converts d to the type of package memory.
func direction(d fault.Direction) memory.Direction {
	var out memory.Direction
	if d&fault.Requests != 0 {
		out |= memory.Requests
	}
	if d&fault.Replies != 0 {
		out |= memory.Replies
	}
	return out
}

func (l networkLink) Pass()                                     { l.net.Pass() }
func (l networkLink) Hold(d fault.Direction)                    { l.net.Hold(direction(d)) }
func (l networkLink) Drop(d fault.Direction)                    { l.net.Drop(direction(d)) }
func (l networkLink) Delay(d fault.Direction, by time.Duration) { l.net.Delay(direction(d), by) }
func (l networkLink) Reset()                                    { l.net.Reset() }
func (l networkLink) Refuse()                                   { l.net.Refuse() }
func (l networkLink) Seen(d fault.Direction) int64              { return l.net.Seen(direction(d)) }
