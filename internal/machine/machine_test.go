package machine

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// id makes a request id of a short text, and sid a session.
func id(text string) string { return text + strings.Repeat("-", max(0, minIDBytes-len(text))) }

func sid(text string) (id SessionID) {
	copy(id[:], text)
	return id
}

func TestEvents(t *testing.T) {
	s := newStory(t, 4)
	m := s.m
	s.tell("open a")
	if got, err := m.EventsSince(m.Revision(), 10); m.Revision() == 0 || len(got) != 0 || err != nil {
		t.Errorf("at the beginning: %v, %v", got, err)
	}
	for range 3 {
		s.tell("acquire a x", "release a x")
	}
	got, err := m.EventsSince(3, 10)
	if err != nil || len(got) != 4 || got[0].Revision != 4 || got[3].Revision != 7 || got[0].Type != EventAcquired ||
		got[0].Token != 4 || got[1].Type != EventReleased || got[1].Token != 4 || got[1].Owner != "a" ||
		got[1].At != 1 {
		t.Errorf("since 3: %+v, %v", got, err)
	}
	if got, err := m.EventsSince(4, 2); err != nil || len(got) != 2 || got[1].Revision != 6 {
		t.Errorf("two since 4: %+v, %v", got, err)
	}
	compacted := (*CompactedError)(nil)
	if _, err := m.EventsSince(2, 10); !errors.As(err, &compacted) || compacted.Revision != 3 || compacted.Since != 2 {
		t.Errorf("since 2: %v", err)
	}
	if _, err := m.EventsSince(8, 10); !errors.Is(err, ErrAhead) {
		t.Errorf("since 8: %v, want ErrAhead", err)
	}
}

func TestList(t *testing.T) {
	s := newStory(t, 8)
	s.tell("open a,b", "acquire a p/1,p/3,q,p/2", "acquire a tree/x tree", "acquire b q wait")
	names := func(prefix, after string, limit int) string {
		infos, more := s.m.List(prefix, after, limit)
		var all []string
		for _, info := range infos {
			all = append(all, fmt.Sprintf("%s:%d+%d", info.Name, len(info.Holders), info.Waiters))
		}
		return fmt.Sprint(strings.Join(all, " "), " ", more)
	}
	for _, c := range []struct {
		prefix, after string
		limit         int
		want          string
	}{
		{"", "", 10, "p/1:1+0 p/2:1+0 p/3:1+0 q:1+1 tree/x:1+0 false"},
		{"p/", "", 2, "p/1:1+0 p/2:1+0 true"},
		{"p/", "p/2", 2, "p/3:1+0 false"},
		{"z", "", 2, " false"},
		{"", "", 0, " true"},
	} {
		if got := names(c.prefix, c.after, c.limit); got != c.want {
			t.Errorf("List(%q, %q, %d) = %q, want %q", c.prefix, c.after, c.limit, got, c.want)
		}
	}
}

func TestRevisionsRunOutBeforeTheMark(t *testing.T) {
	s := newStory(t, 8)
	s.tell("open a", "acquire a x")
	s.joined = nil
	s.m.revision = maxRevision
	s.m.past.base = maxRevision
	s.m.past.events = nil
	s.wantTold("a: limit Revision\na: ok", "acquire a y", "release a x")
}

// The log does not carry a Target of other operations, and Apply refuses it.
func TestTargetOfAnAcquire(t *testing.T) {
	s := newStory(t, 1)
	s.tell("open a")
	r, _ := s.m.Apply(1, &Command{Op: OpAcquire, Session: sid("a"), Target: 1})
	if r.Code != CodeInvalid || r.Field != "Target" {
		t.Errorf("%+v", r)
	}
}
