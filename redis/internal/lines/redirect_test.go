package lines

import (
	"context"
	"errors"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// A caller may leave in the moment in which a cluster's node sends its step on to another one. The race detector sees
// whether both may touch the step.
func TestCallerLeavesWhileItsStepIsSentOn(t *testing.T) {
	t.Parallel()
	client := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer client.Close()
	ls := New(client, backend.SystemClock(), "", func() {})
	node := goredis.NewClient(&goredis.Options{Addr: "127.0.0.1:1"})
	defer node.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 10 {
		s := NewStep(redisscript.Inform, redisscript.KeysOf("", "n"))
		s.lines = ls
		s.line.Store(ls.to(*node.Options()))
		s.Drop() // its caller cannot take it back any more, as if a line had taken it
		s.Err = &redisconn.Failure{Cause: redisconn.ServerError("ASK 1 127.0.0.1:2")}
		go s.Ended()
		var f *redisconn.Failure
		if err := await(ctx, s); !errors.As(err, &f) || !f.Left {
			t.Errorf("a caller that has left: %v", err)
		} else if f.Sent {
			<-s.done
		}
	}
	for _, ended := range ls.Close() {
		<-ended
	}
}
