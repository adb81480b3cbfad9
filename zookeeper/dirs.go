// This file makes the parent nodes of entries, and removes the nodes of unused names.
//
// A name's node is a container, which ZooKeeper (3.5 and later) removes some time after its last child. It
// looks once a minute, and removes no more than some 150 in a second; a program with a name for each order would fill
// the servers with empty nodes. So the driver removes the nodes that it has used, two seconds after their last use, and
// leaves the leftovers of dead clients to the servers.

package zookeeper

import (
	"context"
	"errors"
	"path"
	"time"

	"github.com/go-zookeeper/zk"
)

// makePath makes a node, and its parents only if they are missing: the user may have no right to make them.
func (d *Driver) makePath(ctx context.Context, s *session, node string, data []byte) error {
	err := d.make(ctx, s, node, data, zk.FlagPersistent)
	if !errors.Is(err, zk.ErrNoNode) || parent(node) == "/" {
		return err
	}
	if err := d.makePath(ctx, s, parent(node), nil); err != nil {
		return err
	}
	return d.make(ctx, s, node, data, zk.FlagPersistent)
}

// remakes bounds the creations of a name's node, or of the root, for one request while other clients keep removing it.
const remakes = 10

// makeDir makes the node of a name. A missing root means that everything was deleted: recognize detects that, and
// returns ErrHistoryLost if this driver has seen another token space.
func (d *Driver) makeDir(ctx context.Context, s *session, dir string) error {
	for n := 0; ; n++ {
		err := d.make(ctx, s, dir, nil, zk.FlagContainer)
		if errors.Is(err, zk.ErrNoNode) && n < remakes {
			if err = d.recognize(ctx, s); err == nil {
				continue
			}
		}
		return err
	}
}

// make makes one node. An existing node is no error.
func (d *Driver) make(ctx context.Context, s *session, path string, data []byte, flag int32) error {
	_, err := do(ctx, s, nil, func(c *zk.Conn) (string, error) {
		if flag == zk.FlagContainer {
			return c.CreateContainer(path, data, flag, d.o.ACL)
		}
		return c.Create(path, data, flag, d.o.ACL)
	})
	if errors.Is(err, zk.ErrNodeExists) {
		return nil
	}
	return err
}

// useDir notes that a name is used, and reports whether the driver has used it lately: then its node probably exists,
// and the acquire need not make it. Zero in dirs means in use, and keeps the node from being removed; leftDir writes
// the instant of the last use instead.
func (d *Driver) useDir(dir string) (known bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, known = d.dirs[dir]
	d.dirs[dir] = 0
	return known
}

// emptyAfter is the time from the last use of a name until its node is removed. Removing and remaking it costs two
// writes, which a busy name should not pay.
const emptyAfter = 2 * time.Second

// leftDir is leftDirLocked for callers that do not hold d.mu.
func (d *Driver) leftDir(dir string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.leftDirLocked(dir)
}

// leftDirLocked notes that one of the driver's entries in dir has ended, and has unused names removed. The caller
// holds d.mu. If the node still has entries of other clients, the server refuses to delete it.
func (d *Driver) leftDirLocked(dir string) {
	// The driver may have other entries there; their end writes a later instant.
	d.dirs[dir] = d.clock.Now()
	d.keepDoingLocked(&d.tidying, emptyAfter/2, d.takeUnused)
}

// takeUnused takes the names that have not been used for emptyAfter, for keepDoingLocked. Their nodes are removed on
// any session with a connection, concurrently: one by one, the round trips of a few hundred names would take longer
// than their use did. Without a session the servers remove them.
func (d *Driver) takeUnused() (work func()) {
	now := d.clock.Now()
	var due []string
	more := false
	for dir, left := range d.dirs {
		switch {
		case left == 0: // in use
		case now.Sub(left) < emptyAfter:
			more = true
		default:
			due = append(due, dir)
			delete(d.dirs, dir)
		}
	}
	if len(due) == 0 && !more {
		return nil
	}
	return func() {
		if s := d.standing(); s != nil {
			sideBySide(len(due), func(i int) { s.removeEmpty(d.ctx, due[i]) })
		}
	}
}

// removeEmpty removes the node of a name if it has no entries. Another client may add an entry between the look and
// the deletion: the server refuses to delete a node with children, and an acquire that misses the node remakes it. A
// node with the reason of a forced release is left to the servers, since the victims have to read it. A failure is not
// repeated: an empty node does no harm.
func (s *session) removeEmpty(ctx context.Context, dir string) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	// Children or content: the name is in use, or a victim still has to read the reason.
	stat, err := s.stat(ctx, dir)
	if err != nil || stat == nil || stat.NumChildren > 0 || stat.DataLength > 0 {
		return
	}
	// The server refuses this if the node has children by now.
	_ = s.run(ctx, func(c *zk.Conn) error { return c.Delete(dir, stat.Version) })
}

// parent returns the node above a node.
func parent(node string) string { return path.Dir(node) }
