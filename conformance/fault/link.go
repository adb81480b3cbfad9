// Package fault breaks things on purpose: the network between one client and one server (Proxy), and processes (Child).
// It serves the conformance suite and the tests of drivers, and is never imported by other code.
package fault

import "time"

// Direction selects one or both directions of a link.
type Direction uint8

const (
	// Requests is the direction from client to server.
	Requests Direction = 1 << iota
	// Replies is the direction from server to client.
	Replies
	// Both directions.
	Both = Requests | Replies
)

// Link is the network between one client and its server. A new Link passes everything. Methods are safe for concurrent
// use and take effect on open and on new connections before they return.
//
// A driver must survive silence, not only errors: Hold and Drop keep connections open without an answer.
type Link interface {
	// Pass heals the link. Bytes that Hold kept back are delivered now, in order, also on connections that the client has
	// closed meanwhile: a request delivered late, after its caller has returned.
	Pass()
	// Hold keeps back bytes in the given direction until Pass. The other direction goes on: one way.
	Hold(Direction)
	// Drop swallows bytes in the given direction, for good: the peer never learns. After Pass the connections
	// that swallowed something are reset, since their byte streams have gaps.
	Drop(Direction)
	// Delay delivers everything in the given direction d later, in order.
	Delay(dir Direction, d time.Duration)
	// Reset closes every open connection abruptly; new ones are accepted.
	Reset()
	// Refuse resets every open connection and refuses new ones until Pass.
	Refuse()
	// Seen returns how many bytes (or, in process, calls) were taken in from the given direction so far, delivered
	// or not. A test asserts with it that its fault happened.
	Seen(Direction) int64
}
