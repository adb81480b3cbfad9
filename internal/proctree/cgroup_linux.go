package proctree

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// cage is a cgroup of the tree, where the system grants one: it also kills processes that are forked meanwhile,
// immediately. Whether the tree has ended does not depend on it. All methods of a nil cage do nothing.
type cage struct {
	dir  string
	file *os.File // of the directory, for the start
}

// newCage makes the cage of a guardian, and has the command start in it; nil if the system grants no cgroup.
func newCage(guardian int, attr *syscall.SysProcAttr) *cage {
	own := ownCgroup()
	if own == "" || !delegated(own) {
		return nil
	}
	c := &cage{dir: cageIn(own, guardian)}
	_ = os.Remove(c.dir) // of an earlier guardian with this number
	if os.Mkdir(c.dir, 0o755) != nil {
		return nil
	}
	if _, err := os.Stat(filepath.Join(c.dir, "cgroup.kill")); err != nil { // before Linux 5.14
		c.remove(attr)
		return nil
	}
	var err error
	if c.file, err = os.Open(c.dir); err != nil {
		c.remove(attr)
		return nil
	}
	attr.UseCgroupFD, attr.CgroupFD = true, int(c.file.Fd())
	return c
}

// cageOf is the cage that a guardian has made, if any.
func cageOf(guardian int) *cage {
	dir := cageIn(ownCgroup(), guardian)
	if _, err := os.Stat(dir); err != nil {
		return nil
	}
	return &cage{dir: dir}
}

func cageIn(own string, guardian int) string {
	return filepath.Join(own, fmt.Sprintf("fencelock-%d", guardian))
}

// ownCgroup is the directory of this process in the cgroup v2 hierarchy; empty without such a hierarchy.
func ownCgroup() string {
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	groups, _ := os.ReadFile("/proc/self/cgroup")
	root := ""
	for line := range strings.Lines(string(mounts)) {
		before, after, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(before); strings.HasPrefix(after, "cgroup2 ") && len(fields) > 4 {
			root = fields[4]
			break
		}
	}
	for line := range strings.Lines(string(groups)) {
		if path, found := strings.CutPrefix(strings.TrimSpace(line), "0::"); found && root != "" {
			return filepath.Join(root, path)
		}
	}
	return ""
}

// delegated reports whether cgroups may be made in dir: systemd manages those that it has not delegated.
func delegated(dir string) bool {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return true // there is no systemd, and the permissions decide
	}
	value := make([]byte, 8)
	for _, name := range []string{"user.delegate", "trusted.delegate"} {
		if n, err := unix.Getxattr(dir, name, value); err == nil && string(value[:n]) == "1" {
			return true
		}
	}
	return false
}

func (c *cage) kill() {
	if c != nil {
		_ = os.WriteFile(filepath.Join(c.dir, "cgroup.kill"), []byte("1"), 0)
	}
}

// remove removes the cage, which is empty.
func (c *cage) remove(attr *syscall.SysProcAttr) {
	if c == nil {
		return
	}
	if attr != nil {
		attr.UseCgroupFD = false
	}
	if c.file != nil {
		c.file.Close()
	}
	_ = os.Remove(c.dir)
}
