package zookeeper_test

import (
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
)

// shared is a server for tests that leave it running, list nothing, and use names of their own. A ZooKeeper takes
// seconds of a processor's time to start.
var shared struct {
	once   sync.Once
	server *containers.ZooKeeperServer // nil: did not start
	owner  owner
}

func sharedServer(t testing.TB) *containers.ZooKeeperServer {
	t.Helper()
	shared.once.Do(func() {
		shared.owner.TB = t
		shared.server = containers.ZooKeeper(&shared.owner)
	})
	if shared.server == nil {
		return containers.ZooKeeper(t) // says why
	}
	return shared.server
}

// owner is a test whose end is that of all tests.
type owner struct {
	testing.TB
	cleanups []func()
}

func (o *owner) Cleanup(f func())                { o.cleanups = append(o.cleanups, f) }
func (o *owner) Failed() bool                    { return false }
func (o *owner) Errorf(text string, args ...any) { fmt.Fprintf(os.Stderr, text+"\n", args...) }

func (o *owner) end() {
	for i := len(o.cleanups) - 1; i >= 0; i-- {
		o.cleanups[i]()
	}
}
