//go:build unix

package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testcert"
	"github.com/fencelock/fencelock/internal/testtier"
)

// procedure is a section of docs/SERVER.md below Procedures, with its blocks of commands.
type procedure struct {
	title  string
	blocks []string
}

// proceduresOf returns what every command needs, and the procedures.
func proceduresOf(t *testing.T) (prelude string, all []procedure) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "SERVER.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "\n## Procedures\n")
	section, _, ended := strings.Cut(rest, "\n## ")
	if !found || !ended {
		t.Fatal("docs/SERVER.md has no section Procedures")
	}
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```")
	for i, part := range strings.Split(section, "\n### ") {
		p := procedure{}
		p.title, _, _ = strings.Cut(part, "\n")
		for _, m := range blocks.FindAllStringSubmatch(part, -1) {
			p.blocks = append(p.blocks, m[1])
		}
		if strings.Count(part, "```") != 2*len(p.blocks) {
			t.Errorf("%s: a block is no sh", p.title)
		}
		if i == 0 {
			prelude = p.blocks[0]
			continue
		}
		all = append(all, p)
	}
	return prelude, all
}

// machines are hosts on which the procedures are executed: a folder each.
type machines struct {
	t         *testing.T
	root      string
	prelude   string
	addresses map[string]string // a:7480
	authority *testcert.Authority
	last      uint64 // token
}

var machineNames = []string{"a", "b", "c"}

func (m *machines) path(host string, parts ...string) string {
	return filepath.Join(append([]string{m.root, host}, parts...)...)
}

// here is a text of the documentation with the addresses and paths of this test.
func (m *machines) here(host, text string) string {
	text = strings.ReplaceAll(text, "$(hostname)", host)
	text = regexp.MustCompile(`\b[abc]:748[02]\b`).ReplaceAllStringFunc(text, func(a string) string { return m.addresses[a] })
	for documented, dir := range map[string]string{
		"/etc/fencelock": "etc", "/var/lib/fencelock": "data", "/var/backups": "backups", "/usr/local/bin": "bin",
	} {
		text = strings.ReplaceAll(text, documented, m.path(host, dir))
	}
	return text
}

// move gives all members new addresses.
func (m *machines) move() {
	all := freeport.Addresses(m.t, 2*len(machineNames))
	for i, host := range machineNames {
		for j, number := range []string{":7480", ":7482"} {
			_, p, _ := strings.Cut(all[2*i+j], ":")
			m.addresses[host+number] = "localhost:" + p
		}
	}
}

// systemctl is as much of it as the procedures need. A process that has ended counts, also if nobody has waited for it.
const systemctl = `#!/bin/sh
runs() { [ -s ROOT/pid ] && grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$(cat ROOT/pid)/status" 2>/dev/null; }
if [ "$2" != fencelock ]; then echo "no unit $2" >&2; exit 5; fi
case $1 in stop|restart) runs && kill -TERM "$(cat ROOT/pid)"; while runs; do sleep 0.05; done;; esac
case $1 in start|restart)
	ROOT/bin/fencelock serve --config ROOT/etc/serve.yaml --data-dir ROOT/data >ROOT/out 2>>ROOT/log </dev/null &
	echo $! >ROOT/pid
	until grep -q 'serving clients' ROOT/out; do runs || { tail -3 ROOT/log >&2; exit 1; }; sleep 0.05; done;;
esac
exit 0
`

func newMachines(t *testing.T, prelude string) *machines {
	m := &machines{t: t, root: t.TempDir(), prelude: prelude, addresses: map[string]string{}, authority: testcert.New(t)}
	m.move()
	t.Cleanup(func() {
		for _, host := range machineNames {
			m.kill(host)
			if text, err := os.ReadFile(m.path(host, "log")); t.Failed() && err == nil {
				t.Logf("log of %s:\n%s", host, text)
			}
		}
	})
	for _, host := range machineNames {
		for _, dir := range []string{"etc/tls", "bin", "backups"} {
			if err := os.MkdirAll(m.path(host, dir), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		m.write(0o700, strings.ReplaceAll(systemctl, "ROOT", m.path(host)), host, "bin", "systemctl")
		m.write(0o700, m.program("first"), host, "bin", "fencelock")
		m.certify(host, "etc/tls/cert.pem", "etc/tls/key.pem")
		m.copy(m.authority.File, host, "etc/tls/ca.pem")
	}
	return m
}

// program returns a script that runs the program as the given version.
func (m *machines) program(version string) string {
	return fmt.Sprintf("#!/bin/sh\n# %s\n%s=1 exec %s \"$@\"\n", version, asProgram, executable(m.t))
}

func (m *machines) write(mode os.FileMode, text string, path ...string) {
	m.t.Helper()
	if err := os.WriteFile(m.path(path[0], path[1:]...), []byte(text), mode); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machines) copy(from string, to ...string) {
	m.t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		m.t.Fatal(err)
	}
	m.write(0o600, string(text), to...)
}

func (m *machines) certify(host, certificate, key string) {
	m.t.Helper()
	c, k := m.authority.Sign(m.t, "localhost")
	m.copy(c, host, certificate)
	m.copy(k, host, key)
}

// kill ends a member as a crash does.
func (m *machines) kill(host string) {
	text, err := os.ReadFile(m.path(host, "pid"))
	if err != nil {
		return
	}
	if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		eventually(m.t, "the member of "+host+" is dead", func() bool { return !alive(pid) })
	}
}

func (m *machines) lose(host string) {
	m.t.Helper()
	m.kill(host)
	if err := os.RemoveAll(m.path(host, "data")); err != nil {
		m.t.Fatal(err)
	}
}

var onHosts = regexp.MustCompile(`^# on ([abc](?:(?:, | and )[abc])*)$`)

// execute executes a block: "# on a and b" says where what follows is done, on one host after the other.
func (m *machines) execute(block string) {
	m.t.Helper()
	var hosts []string
	var lines []string
	flush := func() {
		for _, host := range hosts {
			m.shell(host, strings.Join(lines, "\n"))
		}
		lines = nil
	}
	for _, line := range strings.Split(block, "\n") {
		if on := onHosts.FindStringSubmatch(line); on != nil {
			flush()
			hosts = strings.FieldsFunc(strings.ReplaceAll(on[1], " and ", ","), func(r rune) bool { return r == ',' || r == ' ' })
			continue
		}
		lines = append(lines, line)
	}
	if len(hosts) == 0 {
		m.t.Fatalf("it does not say on which host:\n%s", block)
	}
	flush()
}

func (m *machines) shell(host, commands string) string {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), 4*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-e", "-c", m.here(host, m.prelude+commands))
	cmd.Dir = m.path(host)
	cmd.Env = append(os.Environ(), "PATH="+m.path(host, "bin")+":"+os.Getenv("PATH"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.t.Fatalf("on %s: %v\n%s\n%s", host, err, commands, out)
	}
	return string(out)
}

// serves acquires a lock: the cluster works, and tokens rise.
func (m *machines) serves(host string) {
	m.t.Helper()
	text := m.shell(host, `fencelock run --name x --tier correctness -- sh -c 'echo "token $FENCELOCK_TOKEN"'`)
	_, after, _ := strings.Cut(text, "token ")
	number, _, _ := strings.Cut(after, "\n")
	token, err := strconv.ParseUint(number, 10, 64)
	if err != nil || token <= m.last {
		m.t.Errorf("token %q after %d: %v", number, m.last, err)
	}
	m.last = token
}

// serial is that of the certificate that a member shows to clients.
func (m *machines) serial(host string) string {
	conn, err := tls.Dial("tcp", m.addresses[host+":7480"], &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // looked at only
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
}

// Each procedure of docs/SERVER.md does what it says, with the commands in the text.
func TestProcedures(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	prelude, all := proceduresOf(t)
	m := newMachines(t, prelude)
	serials := map[string]string{}
	// Checks before each block, and after the last.
	known := map[string][]func(){
		"Install three members": {nil, func() {
			for _, host := range machineNames {
				m.copy(m.path("a", "etc/join-key"), host, "etc/join-key")
			}
		}, nil},
		"Upgrade": {func() {
			for _, host := range machineNames {
				m.write(0o600, m.program("second"), host, "fencelock.new")
			}
		}, func() {
			for _, host := range machineNames {
				if text := m.shell(host, "cat /usr/local/bin/fencelock"); !strings.Contains(text, "# second") {
					t.Errorf("%s has not the new program: %s", host, text)
				}
			}
		}},
		"Rotate certificates": {func() {
			for _, host := range machineNames {
				serials[host] = m.serial(host)
				m.certify(host, "cert.new", "key.new")
			}
		}, func() {
			for _, host := range machineNames {
				eventually(t, "the new certificate is shown", func() bool { return m.serial(host) != serials[host] })
			}
		}},
		"Replace a member": {func() { m.lose("c") }, nil},
		"A full disk":      {func() { m.kill("b") }, nil},
		"Move to other addresses": {nil, func() {
			old := map[string]string{}
			for name, address := range m.addresses {
				old[address] = name
			}
			m.move()
			for _, host := range machineNames {
				text, err := os.ReadFile(m.path(host, "etc/serve.yaml"))
				if err != nil {
					t.Fatal(err)
				}
				moved := regexp.MustCompile(`localhost:\d+`).ReplaceAllStringFunc(string(text), func(a string) string {
					return m.addresses[old[a]]
				})
				m.write(0o600, moved, host, "etc/serve.yaml")
			}
		}, nil},
		"Back up, and restore after the loss of all disks": {nil, func() { m.serves("a") }, nil, nil},
		"Most members are lost": {func() {
			m.lose("a")
			m.lose("b")
		}, nil, nil},
	}
	for _, p := range all {
		around := known[p.title]
		if len(around) != len(p.blocks)+1 {
			t.Fatalf("%q has %d blocks, and the test knows of %d", p.title, len(p.blocks), len(around)-1)
		}
		for i, block := range append(p.blocks, "") {
			if around[i] != nil {
				around[i]()
			}
			if block != "" {
				m.execute(block)
			}
		}
		m.serves("a")
		if t.Failed() {
			t.Fatalf("%s fails", p.title)
		}
		t.Logf("%s: done", p.title)
		delete(known, p.title)
	}
	for title := range known {
		t.Errorf("the page has no procedure %q", title)
	}
}
