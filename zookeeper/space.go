package zookeeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
)

// rootValue is what stands in the root node.
type rootValue struct {
	Space string `json:"fencelock_space"`
}

func (d *Driver) tokenSpace() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.space
}

// prepare makes the root where it is missing, and learns the token space, once.
func (d *Driver) prepare(ctx context.Context, s *session) error {
	if d.tokenSpace() != "" {
		return nil
	}
	for {
		space, err := d.readSpace(ctx, s)
		switch {
		case errors.Is(err, zk.ErrNoNode):
			err = d.makeRoot(ctx, s)
		case err == nil:
			d.mu.Lock()
			if d.space == "" {
				d.space = space
			}
			d.mu.Unlock()
			return nil
		}
		if err != nil && !errors.Is(err, zk.ErrBadVersion) {
			return err
		}
	}
}

// readSpace reads the token space, and writes one where there is none: an operator may have made the root.
func (d *Driver) readSpace(ctx context.Context, s *session) (string, error) {
	type node struct {
		data []byte
		stat *zk.Stat
	}
	root, err := do(ctx, s, nil, func(c *zk.Conn) (node, error) {
		data, stat, err := c.Get(d.root)
		return node{data, stat}, err
	})
	if err != nil {
		return "", err
	}
	var v rootValue
	if json.Unmarshal(root.data, &v) == nil && v.Space != "" {
		return v.Space, nil
	}
	if len(root.data) > 0 { // not ours to overwrite
		return fmt.Sprintf("zookeeper-%x-%x", root.stat.Czxid, root.stat.Ctime), nil
	}
	space := newSpace()
	text, err := json.Marshal(rootValue{space})
	if err != nil {
		return "", err
	}
	_, err = do(ctx, s, nil, func(c *zk.Conn) (struct{}, error) {
		_, err := c.Set(d.root, text, root.stat.Version)
		return struct{}{}, err
	})
	return space, err
}

func newSpace() string { return "zookeeper-" + backend.NewRequestID() }

// makeRoot makes the root and the nodes above it. If it is known, the token space stays what it was: the ensemble counts
// on, whoever deleted the root.
func (d *Driver) makeRoot(ctx context.Context, s *session) error {
	space := d.tokenSpace()
	if space == "" {
		space = newSpace()
	}
	text, err := json.Marshal(rootValue{space})
	if err != nil {
		return err
	}
	for i := 1; i <= len(d.root); i++ {
		if i < len(d.root) && d.root[i] != '/' {
			continue
		}
		var data []byte
		if i == len(d.root) {
			data = text
		}
		if err := d.make(ctx, s, d.root[:i], data, zk.FlagPersistent); err != nil {
			return err
		}
	}
	return nil
}

// makeDir makes the node of a name: a container, which the server removes some time after its last child. Servers before
// 3.5 have none; there it stays.
func (d *Driver) makeDir(ctx context.Context, s *session, dir string) error {
	for n := 0; ; n++ {
		err := d.make(ctx, s, dir, nil, zk.FlagContainer)
		if errors.Is(err, zk.ErrNoNode) && n < tries {
			if err = d.makeRoot(ctx, s); err == nil {
				continue
			}
		}
		if err != nil && strings.Contains(err.Error(), "unknown error") {
			err = d.make(ctx, s, dir, nil, zk.FlagPersistent)
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

// dirsKnown bounds what announceDir remembers.
const dirsKnown = 4096

// announceDir sends the creation of a name's node if the driver has not used the name lately, and returns when it has been
// sent: what comes next arrives after it, in the same round trip. Whether it worked shows there.
func (d *Driver) announceDir(ctx context.Context, s *session, dir string) {
	d.mu.Lock()
	known := d.dirs[dir]
	if len(d.dirs) >= dirsKnown {
		clear(d.dirs)
	}
	d.dirs[dir] = true
	d.mu.Unlock()
	if known {
		return
	}
	written := s.expectDir(dir)
	answered := make(chan struct{})
	if d.enter() != nil {
		return
	}
	go func() {
		defer d.work.Done()
		defer close(answered)
		_ = d.make(ctx, s, dir, nil, zk.FlagContainer)
	}()
	select {
	case <-written:
	case <-answered:
	case <-ctx.Done():
	}
}

func parent(node string) string { return path.Dir(node) }
