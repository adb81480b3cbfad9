package builtin_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/internal/testtier"
)

// smallDisk is the size of a file system that a test fills quickly, in bytes.
const smallDisk = 4 << 20

// TestClusterFaultsOnAFullFileSystem injects the fault full-disk with a file system that is really full, which needs
// the privilege to mount one. TestClusterFaults only simulates the full disk.
func TestClusterFaultsOnAFullFileSystem(t *testing.T) {
	testtier.Only(t)
	if err := mountSmall(t, t.TempDir()); errors.Is(err, syscall.EPERM) {
		t.Log("not run: no permission to mount a file system")
		return
	} else if err != nil {
		t.Fatal(err)
	}
	cluster.RunAll(t, func(t testing.TB, _ cluster.Fault) cluster.Harness {
		p := startProcesses(t, 3, member{SegmentBytes: 4 * smallSegment, prepare: func(dir string) {
			if err := mountSmall(t, dir); err != nil {
				t.Fatal(err)
			}
		}})
		h := p.harness(t)
		var hits [3]atomic.Int64
		filler := func(i int) string { return filepath.Join(p.members[i].DataDir, "filler") }
		h.Disk = func(_ context.Context, i int, _ cluster.Disk) error {
			err := fill(filler(i))
			if errors.Is(err, syscall.ENOSPC) {
				hits[i].Add(1)
				return nil
			}
			return err
		}
		h.Hits = func(i int) int64 { return hits[i].Load() }
		h.Start = func(ctx context.Context, i int) error {
			if err := os.Remove(filler(i)); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			return p.start(ctx, i)
		}
		return h
	}, "full-disk")
}

// mountSmall mounts a small file system in memory on dir, until the end of the test.
func mountSmall(t testing.TB, dir string) error {
	err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=4m")
	if err != nil {
		return err
	}
	var is syscall.Statfs_t
	if err := syscall.Statfs(dir, &is); err != nil || is.Blocks*uint64(is.Bsize) != smallDisk {
		t.Errorf("%s has %d blocks of %d bytes, %v; want %d bytes in all", dir, is.Blocks, is.Bsize, err, smallDisk)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return nil
}

// fill writes to a new file until there is an error.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for block := make([]byte, 4<<10); ; {
		if _, err := f.Write(block); err != nil {
			return err
		}
	}
}
