package zookeeper

import (
	"context"
	"errors"
	"path"
)

// own is an entry as it was read.
type own struct {
	entry
	value
	version int32
	owner   int64 // the session
	ctime   int64
}

// ownOf is an entry as it was read. It is false for a missing node, and for a foreign one, which is not ephemeral,
// whatever its name.
func ownOf(a reply, at string) (own, bool, error) {
	n, err := a.node()
	if err != nil {
		return own{}, false, ignore(err, codeNoNode)
	}
	x, ok := entryOf(path.Dir(at), path.Base(at))
	return own{x, decode(n.data, n.stat.Czxid), n.stat.Version, n.stat.EphemeralOwner, n.stat.Ctime},
		ok && n.stat.EphemeralOwner != 0, nil
}

// read reads entries and returns the existing ones in order. With watch, it also watches them.
func (s *session) read(ctx context.Context, all []entry, watch bool) (found []own, err error) {
	if len(all) == 0 {
		return nil, nil
	}
	reqs := make([]request, len(all))
	for i, x := range all {
		reqs[i] = getData(x.path, watch)
	}
	replies, err := s.ask(ctx, reqs...)
	if err != nil {
		return nil, err
	}
	for i, a := range replies {
		x, ok, err := ownOf(a, all[i].path)
		if err != nil {
			return nil, err
		}
		if ok {
			found = append(found, x)
		}
	}
	return found, nil
}

// byPath returns entries by their paths.
func byPath(all []own) map[string]own {
	found := make(map[string]own, len(all))
	for _, x := range all {
		found[x.path] = x
	}
	return found
}

// movedVersions is the number of versions through which moved entries cycle.
const movedVersions = 7

// move replaces entries by others with the same name, content and token on s, each in a transaction: the caller reads
// them again. The number is part of the name so that the place in the queue stays; the content has the token, because
// the new node has its own zxid. The writes give the new node another version, so that a late deletion or move of the
// former one does not affect it. Without the right to write, the version stays 0; then only the read before each
// deletion protects the new node.
func (s *session) move(ctx context.Context, all ...own) error {
	for writes := true; len(all) > 0; writes = false {
		reqs := make([]request, len(all))
		for i, x := range all {
			data := x.encode()
			ops := []request{remove(x.path, x.version), create(opCreate, x.path, data, s.e.o.ACL, flagEphemeral)}
			for n := int32(0); writes && n <= x.version%movedVersions; n++ {
				ops = append(ops, setData(x.path, data, anyVersion))
			}
			reqs[i] = multi(ops...)
		}
		replies, err := s.do(ctx, reqs...)
		if err != nil {
			return err
		}
		var refused []own
		for i, a := range replies {
			switch err := ignore(a.failed(), codeNoNode, codeBadVersion); {
			case errors.Is(err, codeNoAuth) && writes:
				refused = append(refused, all[i])
			case err != nil:
				return err
			}
		}
		all = refused
	}
	return nil
}
