// Package fault injects faults into the network between one client and one server (Proxy), and into processes
// (Child). It is for the conformance suite, for tests and for benchmarks; production code does not import it.
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

// Link is the network between one client and its server. A new Link passes all bytes. Methods are safe for concurrent
// use and take effect on open and on new connections before they return.
//
// A driver must survive missing answers, not only errors: Hold and Drop keep connections open without an answer.
type Link interface {
	// Pass heals the link. It delivers the bytes that Hold kept back, in order, even on connections that the client has
	// closed meanwhile: a request may arrive late, after its caller has returned.
	Pass()
	// Hold keeps back bytes in the given direction until Pass. The other direction still passes.
	Hold(Direction)
	// Drop discards bytes in the given direction, without notice to the peer. Pass resets the connections that have lost
	// bytes, since their byte streams have gaps.
	Drop(Direction)
	// Delay delivers all bytes in the given direction d later, in order.
	Delay(dir Direction, d time.Duration)
	// Reset closes every open connection abruptly; new connections are accepted.
	Reset()
	// Refuse resets every open connection and refuses new connections until Pass.
	Refuse()
	// Seen returns the number of bytes (in process: of calls) received in the given direction so far, delivered or not.
	// A test uses it to assert that its fault happened.
	Seen(Direction) int64
}
