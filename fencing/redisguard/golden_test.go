package redisguard

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/golden"
)

// recorder is a Redis that writes down what it is asked, and answers what the test says.
type recorder struct {
	out     strings.Builder
	scripts map[string]string // names by hash
	hash    string            // of the script that is loaded
	answer  func(script string) any
}

func (r *recorder) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *recorder) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (r *recorder) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		args := cmd.Args()
		if args[0] == "script" { // load
			fmt.Fprintln(&r.out, strings.TrimSpace(fmt.Sprint(args[2])))
			cmd.(*redis.StringCmd).SetVal(r.hash)
			return nil
		}
		name := r.scripts[fmt.Sprint(args[1])]
		var n int
		fmt.Sscan(fmt.Sprint(args[2]), &n)
		fmt.Fprintf(&r.out, "%v %s\n", args[0], name)
		for i, arg := range args[3:] {
			if i < n {
				fmt.Fprintf(&r.out, "  KEYS[%d] %q\n", i+1, fmt.Sprint(arg))
			} else {
				fmt.Fprintf(&r.out, "  ARGV[%d] %q\n", i+1-n, fmt.Sprint(arg))
			}
		}
		cmd.(*redis.Cmd).SetVal(r.answer(name))
		return nil
	}
}

func TestGolden(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	write := NewWrite(`redis.call('SET', KEYS[1], ARGV[1])`)
	r := &recorder{scripts: map[string]string{}}
	client.AddHook(r)
	r.out.WriteString("The scripts. For a write the first line of check is: local function write(KEYS, ARGV) … end\n")
	for _, each := range []struct {
		name   string
		script *redis.Script
	}{{"check", checkOnly.script}, {"look at the terms", lookTerms}, {"look", look}, {"change", change}, {"forget", forget}} {
		r.hash = each.script.Hash()
		r.scripts[r.hash] = each.name
		fmt.Fprintf(&r.out, "\n# %s\n", each.name)
		each.script.Load(t.Context(), client)
	}
	r.scripts[write.script.Hash()] = "check, with a write"
	r.out.WriteString("\n\nWhat is sent.\n")
	title := func(text string) { fmt.Fprintf(&r.out, "\n# %s\n", text) }
	id, err := fencing.ParseNonce("5a2f19fbb6b44c5f8f7b1d3c9a0e6f21")
	if err != nil {
		t.Fatal(err)
	}
	const pinned = "2 5a2f19fbb6b44c5f8f7b1d3c9a0e6f21 1 5 =etcd-1"
	claims := fencing.Set{
		{
			Resource: "a", Token: 33, Space: "etcd-1", Sequence: 7, Generation: fencing.Generation{Number: 1, ID: id}, Nonce: id,
		},
		{Resource: "b", Token: fencing.Token(9).NotExclusive(), Space: "etcd-1"},
	}
	g, err := New(client, &Options{ID: id})
	if err != nil {
		t.Fatal(err)
	}
	r.answer = func(string) any { return []any{int64(1)} }
	title("a check of two claims, one of them of a shared hold")
	if err := g.Check(t.Context(), claims); err != nil {
		t.Error(err)
	}
	title("a write")
	if _, err := g.Do(t.Context(), claims[0], write, []string{"value:{a}"}, "x"); err != nil {
		t.Error(err)
	}
	title("a check on Redis Cluster")
	g.cluster = true
	r.answer = func(script string) any {
		if script == "look at the terms" {
			return pinned
		}
		return []any{int64(1)}
	}
	if err := g.Check(t.Context(), claims[0]); err != nil {
		t.Error(err)
	}
	title("accept etcd-2 from token 6 on")
	r.answer = func(script string) any {
		if script == "look at the terms" {
			return pinned
		}
		return int64(1)
	}
	if err := g.Accept(t.Context(), "etcd-2", 6); err != nil {
		t.Error(err)
	}
	golden.Compare(t, "redis.txt", r.out.String())
}
