package check

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// History has the events of the clients in the order of their instants, and for each client in the order of
// recording.
type History struct {
	Events []Event
}

// ReadHistory reads the output of a Recorder's Options.Writer, or of History.Write. It ignores a truncated last line,
// from a killed writer.
func ReadHistory(r io.Reader) (History, error) {
	var h History
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		whole := err == nil
		if err != nil && !errors.Is(err, io.EOF) {
			return h, fmt.Errorf("history: line %d: %w", n, err)
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			var e Event
			if err := json.Unmarshal(line, &e); err == nil {
				h.Events = append(h.Events, e)
			} else if whole {
				return h, fmt.Errorf("history: line %d: %w", n, err)
			}
		}
		if !whole {
			return h, nil
		}
	}
}

// Write writes the history, one line of JSON per event.
func (h History) Write(w io.Writer) error {
	out := json.NewEncoder(w)
	for _, e := range h.Events {
		if err := out.Encode(e); err != nil {
			return fmt.Errorf("history: %w", err)
		}
	}
	return nil
}

// Merge merges histories, which must share the clock and have different clients.
func Merge(histories ...History) History {
	var all History
	for _, h := range histories {
		all.Events = append(all.Events, h.Events...)
	}
	slices.SortStableFunc(all.Events, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	return all
}
