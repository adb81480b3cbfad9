package zookeeper

import (
	"context"
	"encoding/json"
	"errors"
	"path"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend/kit"
)

// makeRoot makes the root with a new random token space, and the nodes above it.
func (d *Driver) makeRoot(ctx context.Context, s *session) error {
	text, err := json.Marshal(rootValue{newSpace()})
	if err != nil {
		return err
	}
	return d.makePath(ctx, s, d.root, text)
}

// makePath makes a node, and those above it only where they are missing: the user may have no right to make them.
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

// remakes is how often a name's node, or the root, is made again for one request when others remove it at once.
const remakes = 10

// makeDir makes the node of a name: a container, which the server removes some time after its last child.
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

// useDir notes that a name is used, and reports whether the driver has used it lately: then its node is likely to be
// there.
func (d *Driver) useDir(dir string) (known bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, known = d.dirs[dir]
	d.dirs[dir] = 0
	return known
}

// emptyAfter is how long nobody here has used a name before its node is removed. Removing it and making it again costs
// two writes, which a name that is used all the time should not pay.
const emptyAfter = 2 * time.Second

func (d *Driver) leftDir(dir string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.leftDirLocked(dir)
}

// leftDirLocked notes that one of the driver's entries in dir has gone. d.mu is held.
//
// The servers remove empty containers, too, but no faster than some 150 in a second, however fast they are made. So the
// driver removes what it has used itself; the servers remove what is left by clients that died.
func (d *Driver) leftDirLocked(dir string) {
	d.dirs[dir] = d.clock.Now()
	if !d.tidying && d.ctx.Err() == nil {
		d.tidying = true
		d.background(d.tidyDirs)
	}
}

// tidyDirs removes the empty nodes of names that are not used any more, until there is none left to watch.
func (d *Driver) tidyDirs() {
	for kit.Sleep(d.ctx, emptyAfter/2) == nil {
		due, more := d.takeUnused()
		if s := d.standing(); s != nil {
			sideBySide(len(due), func(i int) { s.removeEmpty(d.ctx, due[i]) })
		}
		if !more {
			return
		}
	}
}

// takeUnused takes out the names that have not been used for a while. If there are no others left over, whoever calls
// must end: leftDirLocked then starts anew.
func (d *Driver) takeUnused() (due []string, more bool) {
	now := d.clock.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
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
	d.tidying = more
	return due, more
}

// removeEmpty removes the node of a name if it has no entries. One that tells why holders lost the name is left to the
// servers.
func (s *session) removeEmpty(ctx context.Context, dir string) {
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	stat, err := s.stat(ctx, dir)
	if err != nil || stat == nil || stat.NumChildren > 0 || stat.DataLength > 0 {
		return
	}
	_, _ = do(ctx, s, nil, func(c *zk.Conn) (struct{}, error) {
		return struct{}{}, c.Delete(dir, stat.Version) // refused if somebody has come meanwhile
	})
}

func parent(node string) string { return path.Dir(node) }
