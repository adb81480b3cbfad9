// Package audit writes who did what to locks and to a cluster: one line of JSON per event, in files of one directory.
//
//	Write ─► queue ─► writer: audit.jsonl ─► audit-TIME.jsonl, of which the oldest are deleted
//
// Writing never delays a lock: events wait in memory, and are dropped and counted where there is no room for them, in
// memory or on disk.
package audit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/fencelock/fencelock/internal/notify"
)

// The outcomes of an event.
const (
	Done    = "done"    // it happened
	Denied  = "denied"  // the rules, or the credential, did not permit it
	Failed  = "failed"  // it did not happen, for another reason
	Unknown = "unknown" // it may have happened
)

// Event is one line. A field that is empty is not written.
type Event struct {
	Time time.Time `json:"time"` // of the line, by the wall clock of the process
	// Server is the member that decided, or the host of a gateway.
	Server string `json:"server"`
	// Event names the event, in words joined by hyphens. Outcome is Done, Denied, Failed or Unknown.
	Event   string `json:"event"`
	Outcome string `json:"outcome"`
	// Principal is who did it, as the server has authenticated them; Nobody has the address. From is their address.
	Principal string `json:"principal,omitempty"`
	// Via is the principal of the gateway that asked for Principal, and has authenticated them.
	Via  string `json:"via,omitempty"`
	From string `json:"from,omitempty"`
	// Name is the lock, or what else it was done to.
	Name string `json:"name,omitempty"`
	// Owner and Holder are of the hold that it is about: as its client claims, and its principal. Token is the hold's.
	Owner  string `json:"owner,omitempty"`
	Holder string `json:"holder,omitempty"`
	Token  uint64 `json:"token,omitempty"`
	// By is who did it, as they claim; Reason is why, as they claim or as the server answered.
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Rules names the rules in force at the time of the line.
	Rules string `json:"rules,omitempty"`
	// Dropped is the number of missing events before this one.
	Dropped uint64 `json:"dropped,omitempty"`
}

const (
	file = "audit.jsonl"
	// maxQueued bounds the events in memory: all holds of the largest session may expire in one step.
	maxQueued = 1 << 18
	// maxText bounds a text of an event, in bytes. A longer one is cut, and ends with "…".
	maxText = 1 << 10
	// maxChunk is about how many bytes are written in one call.
	maxChunk = 64 << 10
)

// FileBytes is the size at which a file is renamed, and another one begun.
const FileBytes = 64 << 20

// Options configure a Log.
type Options struct {
	Dir string
	// Locks has each acquire and release written, too.
	Locks bool
	// Keep is the number of full files to keep, at least 1.
	Keep int
	// FileBytes replaces the constant, for tests. 0: the constant.
	FileBytes int64
	Log       *slog.Logger
}

// Log is a directory of files. All methods are safe for concurrent use, and for a nil Log, which ignores events.
type Log struct {
	o    Options
	wake notify.Signal
	done chan struct{} // closed when the writer has ended

	mu      sync.Mutex // protects the following fields
	queue   []Event
	ended   bool
	missing uint64 // events dropped since the last line
	dropped uint64 // events dropped at all

	// of the writer alone
	out     *os.File // nil after a failure
	size    int64
	limit   int64 // the size beyond which the file is renamed
	failing bool
}

// Open makes the directory if it is missing, and opens its file. No other process may have the directory open.
func Open(o Options) (*Log, error) {
	o.FileBytes = cmp.Or(o.FileBytes, FileBytes)
	l := &Log{o: o, wake: notify.New(), done: make(chan struct{}), limit: o.FileBytes}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	go l.run()
	return l, nil
}

// Locks reports whether acquires and releases are to be written.
func (l *Log) Locks() bool { return l != nil && l.o.Locks }

// Write has an event written soon. It does not block. A zero Time is now.
func (l *Log) Write(e Event) {
	if l == nil {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC()
	for _, text := range []*string{
		&e.Server, &e.Event, &e.Outcome, &e.Principal, &e.Via, &e.From, &e.Name, &e.Owner, &e.Holder, &e.By, &e.Reason,
		&e.Rules,
	} {
		*text = clean(*text)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || len(l.queue) >= maxQueued {
		l.missing++
		l.dropped++
		return
	}
	l.queue = append(l.queue, e)
	l.wake.Notify()
}

// clean returns text as a line may have it: of at most maxText bytes, and without U+0000, which PostgreSQL's jsonb does
// not take.
func clean(text string) string {
	if len(text) > maxText {
		const mark = "…"
		end := maxText - len(mark)
		for !utf8.RuneStart(text[end]) && end > maxText-len(mark)-utf8.UTFMax {
			end--
		}
		text = text[:end] + mark
	}
	return strings.ReplaceAll(text, "\x00", "\uFFFD")
}

// Dropped returns how many events were dropped since Open.
func (l *Log) Dropped() uint64 {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dropped
}

// Close writes the queued events, and closes the file. It waits until ctx ends at most.
func (l *Log) Close(ctx context.Context) error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.wake.Notify()
	select {
	case <-l.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("audit: %w", ctx.Err())
	}
}

// run writes until Close.
func (l *Log) run() {
	defer close(l.done)
	for range l.wake {
		l.mu.Lock()
		batch, ended := l.queue, l.ended
		l.queue = nil
		l.mu.Unlock()
		for len(batch) > 0 {
			batch = batch[l.writeChunk(batch):]
		}
		if ended {
			l.shut()
			return
		}
	}
}

// writeChunk writes the first events, and returns how many those are. What cannot be written is dropped.
func (l *Log) writeChunk(events []Event) int {
	l.mu.Lock()
	missing := l.missing
	l.mu.Unlock()
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	n := 0
	for ; n < len(events) && text.Len() < maxChunk; n++ {
		e := &events[n]
		if e.Dropped = 0; n == 0 {
			e.Dropped = missing
		}
		_ = enc.Encode(e) // strings and numbers: it cannot fail
	}
	written, err := l.put(text.Bytes())
	l.mu.Lock()
	if written > 0 {
		l.missing -= missing
	}
	l.missing += uint64(n - written)
	l.dropped += uint64(n - written)
	dropped := l.dropped
	l.mu.Unlock()
	switch {
	case err != nil && !l.failing:
		l.o.Log.Error("audit events are dropped", "dir", l.o.Dir, "error", err)
	case err == nil && l.failing:
		l.o.Log.Info("audit events are written again", "dir", l.o.Dir, "dropped", dropped)
	}
	l.failing = err != nil
	return n
}

// put appends lines, and returns how many of them the file has.
func (l *Log) put(text []byte) (lines int, err error) {
	if l.out != nil && l.size > 0 && l.size+int64(len(text)) > l.limit {
		l.rotate()
	}
	if l.out == nil {
		if err := l.open(); err != nil {
			return 0, err
		}
	}
	n, err := l.out.Write(text)
	l.size += int64(n)
	if err != nil { // open removes an incomplete line, now or later
		l.shut()
		if l.open() == nil {
			l.shut()
		}
	}
	return bytes.Count(text[:n], []byte("\n")), err
}

// open opens the file, without the partial line of an earlier write.
func (l *Log) open() error {
	f, err := os.OpenFile(filepath.Join(l.o.Dir, file), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	about, err := f.Stat()
	if err == nil && about.Mode().IsRegular() {
		l.size, err = trim(f, about.Size())
	}
	if err != nil {
		_ = f.Close()
		return err
	}
	l.out = f
	return nil
}

// trim cuts a file after its last whole line.
func trim(f *os.File, size int64) (int64, error) {
	whole := size
	tail := make([]byte, maxChunk)
	for whole > 0 {
		from := max(0, whole-int64(len(tail)))
		n, err := f.ReadAt(tail[:whole-from], from)
		if err != nil {
			return 0, err
		}
		if end := bytes.LastIndexByte(tail[:n], '\n'); end >= 0 {
			whole = from + int64(end) + 1
			break
		}
		whole = from
	}
	if whole == size {
		return size, nil
	}
	return whole, f.Truncate(whole)
}

// shut closes the file.
func (l *Log) shut() {
	if l.out != nil {
		_ = l.out.Sync()
		_ = l.out.Close()
	}
	l.out, l.size = nil, 0
}
