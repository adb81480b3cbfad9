package serverfault

import (
	"sync"
	"time"
	"unsafe"
)

// Clock is a clock with a date that can jump, as when an administrator sets it, or a virtual machine is moved. Its
// monotonic part continues undisturbed: the operating system promises that. The zero value is right. It is safe for
// concurrent use.
type Clock struct {
	mu      sync.Mutex
	off     time.Duration
	unseen  bool
	Noticed func() // called, if not nil, when Now is asked for the first time after a jump
}

// Jump moves the date by d, which is rounded down to seconds.
func (c *Clock) Jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += d
	c.unseen = true
}

// Now is time.Now by this clock.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	off, noticed := c.off, c.unseen
	c.unseen = false
	c.mu.Unlock()
	if noticed && c.Noticed != nil {
		c.Noticed()
	}
	return redate(time.Now(), off)
}

// redate changes the date of a time and not its monotonic reading, which package time cannot do: Add changes
// both. The first word of a time that has such a reading is a flag, 33 bits of seconds and 30 bits of nanoseconds.
func redate(t time.Time, d time.Duration) time.Time {
	*(*uint64)(unsafe.Pointer(&t)) += uint64(d/time.Second) << 30
	return t
}
