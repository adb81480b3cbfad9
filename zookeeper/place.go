package zookeeper

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/backend/engine"
)

// place is Position.Place: an entry of this driver, and the entries that blocked it.
type place struct {
	session int64
	path    string
	version int32
	behind  []string
}

// placed returns the text that placeOf reads, and that Watch reads for the path of the entry.
func placed(s *session, x own, block []entry) string {
	text := watching(s, []string{x.path}) + "\n=" + strconv.Itoa(int(x.version))
	for _, blocker := range paths(block) {
		text += "\n=" + blocker
	}
	return text
}

func placeOf(text string) (p place) {
	parts := strings.Split(text, "\n")
	if len(parts) < 3 {
		return place{}
	}
	id, _ := strconv.ParseUint(parts[0], 16, 64)
	version, _ := strconv.Atoi(parts[2][1:])
	p = place{session: int64(id), path: parts[1], version: int32(version)}
	for _, blocker := range parts[3:] {
		p.behind = append(p.behind, blocker[1:])
	}
	return p
}

// watching names nodes for Watch.
func watching(s *session, paths []string) string {
	return strings.Join(append([]string{strconv.FormatUint(uint64(s.id), 16)}, paths...), "\n")
}

func paths(some []entry) []string {
	all := make([]string, len(some))
	for i, x := range some {
		all[i] = x.path
	}
	return all
}

// Watch is engine.Watches's: it watches entries over the session of the waiter. If they stand when the watch does,
// nothing has happened since they were read. It wakes if one is missing or foreign. A node that was written, or moved,
// is watched again.
func (e *service) Watch(ctx context.Context, what string, wake func()) error {
	parts := strings.Split(what, "\n")
	id, _ := strconv.ParseUint(parts[0], 16, 64)
	s := e.ours(int64(id))
	if s == nil {
		return engine.ErrNoSession
	}
	var all []entry
	for _, part := range parts[1:] {
		if part[0] == '/' {
			all = append(all, entry{path: part})
		}
	}
	for len(all) > 0 {
		changes := make(chan change, 1)
		unlisten := s.listen(changes, paths(all))
		found, err := s.read(ctx, all, true)
		var c change
		if err == nil && len(found) == len(all) {
			select {
			case c = <-changes:
				if c.typ == 0 {
					err = errBroken
				}
			case <-ctx.Done():
				err = ctx.Err()
			case <-s.over:
				err = engine.ErrNoSession
			}
		}
		unlisten()
		if err != nil {
			return err
		}
		stand := byPath(found)
		all = slices.DeleteFunc(all, func(x entry) bool {
			_, ok := stand[x.path]
			return !ok || c.typ == eventDeleted && x.path == c.path
		})
		wake()
	}
	<-ctx.Done()
	return ctx.Err()
}
