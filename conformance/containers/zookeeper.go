package containers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// ZooKeeperTick is the tickTime of the servers that this package starts: sessions last between 1.5 s and 15 s. Shorter
// ticks would make shorter tests, but allow less than the half second for which a busy machine may stop a server and
// its clients.
const ZooKeeperTick = 750 * time.Millisecond

// ZooKeeperServer is one ZooKeeper. Its data survives Restart.
type ZooKeeperServer struct{ *Server }

// ZooKeeper starts a ZooKeeper for the test t, and stops it at the end. Every call starts a new server, which takes
// some seconds.
//
// The image is FENCELOCK_IMAGE_ZOOKEEPER, by default the official one; it must support the variables of the official
// image. Otherwise Java runs the server from Debian's package libzookeeper-java, or from the folder of the
// zkServer.sh on PATH.
func ZooKeeper(t testing.TB, opts ...Option) *ZooKeeperServer {
	t.Helper()
	return &ZooKeeperServer{run(t, zooKeeperSpec(), opts, newContainer, newZooKeeperProcess)}
}

// zooKeeperSpec returns the common spec of a single server and an ensemble's node.
func zooKeeperSpec() spec {
	return spec{
		name:  "ZooKeeper",
		image: "zookeeper:3.9",
		env:   "FENCELOCK_IMAGE_ZOOKEEPER",
		port:  "2181/tcp",
		environ: []string{
			"ZOO_TICK_TIME=" + strconv.FormatInt(ZooKeeperTick.Milliseconds(), 10), "ZOO_MAX_CLIENT_CNXNS=0",
			"ZOO_4LW_COMMANDS_WHITELIST=srvr", "ZOO_ADMINSERVER_ENABLED=false",
			"JVMFLAGS=" + strings.Join(zooKeeperJava, " "),
		},
		binary: "java",
		ready:  zooKeeperReady,
		install: "a Docker engine that can pull zookeeper:3.9, or ZooKeeper " +
			"(Debian and Ubuntu: apt-get install libzookeeper-java openjdk-17-jre-headless)",
	}
}

// zooKeeperJava makes Java small and quick to start. Tests kill servers, not the machine, so that no data is lost
// without waiting for the disk. Statistics are off, since they use a mapped file: Java may wait for its pages while
// all of its threads are stopped.
var zooKeeperJava = []string{
	"-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Dzookeeper.forceSync=no",
}

// newZooKeeperProcess runs the server with the installed classes.
func newZooKeeperProcess(ctx context.Context, sp spec) (node, string, error) {
	classes := "/usr/share/java/zookeeper.jar"
	if script, err := exec.LookPath("zkServer.sh"); err == nil {
		classes = filepath.Join(filepath.Dir(filepath.Dir(script)), "lib", "*")
	} else if _, err := os.Stat(classes); err != nil {
		return nil, "", fmt.Errorf("no zkServer.sh on PATH, and no %s", classes)
	} else {
		classes = "/usr/share/java/*"
	}
	n, way, err := newProcess(ctx, sp)
	if err != nil {
		return nil, "", err
	}
	p := n.(*process)
	p.spec.process = func(addr, dir string) []string {
		_, port, _ := strings.Cut(addr, ":")
		config := filepath.Join(dir, "zoo.cfg")
		// A failed write is no error here: the server reports it. Of two lines with one key, the later one takes effect.
		lines := []string{"clientPort=" + port}
		if p.spec.ensemble != nil { // which has the clients' ports, too
			lines = slices.Clone(p.spec.ensemble)
		}
		lines = append(lines, "dataDir="+dir, fmt.Sprintf("tickTime=%d", ZooKeeperTick.Milliseconds()), "maxClientCnxns=0")
		lines = slices.Concat(lines, p.spec.settings, p.spec.last)
		_ = os.WriteFile(config, []byte(strings.Join(lines, "\n")+"\n"), 0o600)
		return slices.Concat(zooKeeperJava, p.spec.java, []string{
			"-Dzookeeper.admin.enableServer=false", "-Dzookeeper.4lw.commands.whitelist=srvr",
			"-cp", classes, "org.apache.zookeeper.server.quorum.QuorumPeerMain", config,
		})
	}
	for name, data := range sp.files {
		file := filepath.Join(p.dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, data, 0o600)); err != nil {
			return nil, "", errors.Join(err, p.close(ctx))
		}
	}
	return p, way, nil
}

// Reconfigure kills a server that was started with AsProcess, and restarts it with other lines instead of those of
// Settings. The data stays.
func (s *ZooKeeperServer) Reconfigure(ctx context.Context, lines ...string) error {
	s.control.Lock()
	defer s.control.Unlock()
	p, ok := s.node.(*process)
	if !ok {
		return fmt.Errorf("%s: reconfigure: the server does not run as a process", s)
	}
	if err := s.stop(ctx); err != nil {
		return err
	}
	p.spec.settings = lines
	return s.start(ctx)
}

// zooKeeperReady reports whether the server at addr serves clients: a node of an ensemble does when it has a leader.
func zooKeeperReady(ctx context.Context, addr string) bool {
	text, err := zooKeeperSays(ctx, addr)
	return err == nil && strings.Contains(text, "Mode: ")
}

// zooKeeperSays returns the answer to the command srvr.
func zooKeeperSays(ctx context.Context, addr string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return "", err
	}
	if _, err := c.Write([]byte("srvr")); err != nil {
		return "", err
	}
	text, err := io.ReadAll(c)
	return string(text), err
}
