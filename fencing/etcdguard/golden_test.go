package etcdguard_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/golden"
)

// recorder is an etcd that writes down what it is asked. It holds the keys it is given, at revision 3, and says that
// they are as they were.
type recorder struct {
	clientv3.KV
	out  strings.Builder
	keys map[string]string
}

func (r *recorder) Txn(context.Context) clientv3.Txn { return &txn{r: r} }

type txn struct {
	clientv3.Txn
	r     *recorder
	cmps  []clientv3.Cmp
	thens []clientv3.Op
	elses []clientv3.Op
}

func (t *txn) If(cmps ...clientv3.Cmp) clientv3.Txn { t.cmps = cmps; return t }
func (t *txn) Then(ops ...clientv3.Op) clientv3.Txn { t.thens = ops; return t }
func (t *txn) Else(ops ...clientv3.Op) clientv3.Txn { t.elses = ops; return t }

func (t *txn) Commit() (*clientv3.TxnResponse, error) {
	t.r.out.WriteString("txn\n")
	for _, each := range t.cmps {
		c := each.GetCompare()
		fmt.Fprintf(&t.r.out, "  if   %s of %s %s %d\n", c.Target, c.Key, c.Result, c.GetModRevision())
	}
	answer := &clientv3.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: true}
	for _, op := range t.thens {
		answer.Responses = append(answer.Responses, t.r.op("then", op))
	}
	for _, op := range t.elses {
		t.r.op("else", op)
	}
	return answer, nil
}

func (r *recorder) op(when string, op clientv3.Op) *pb.ResponseOp {
	if op.IsPut() {
		fmt.Fprintf(&r.out, "  %s put %s %q\n", when, op.KeyBytes(), op.ValueBytes())
		return &pb.ResponseOp{Response: &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{}}}
	}
	fmt.Fprintf(&r.out, "  %s get %s\n", when, op.KeyBytes())
	found := &pb.RangeResponse{}
	if value, ok := r.keys[string(op.KeyBytes())]; ok {
		found.Kvs = []*mvccpb.KeyValue{{Key: op.KeyBytes(), Value: []byte(value), ModRevision: 3}}
	}
	return &pb.ResponseOp{Response: &pb.ResponseOp_ResponseRange{ResponseRange: found}}
}

func TestGolden(t *testing.T) {
	r := &recorder{}
	guard := must(t, r, nil)
	title := func(text string) { fmt.Fprintf(&r.out, "\n# %s\n", text) }
	r.out.WriteString("Revisions are those that a get before has told, 0 if there is no such key.\n")
	title("a write with two claims, the first of all")
	id, err := fencing.ParseNonce("5a2f19fbb6b44c5f8f7b1d3c9a0e6f21")
	if err != nil {
		t.Fatal(err)
	}
	r.keys = map[string]string{"fencing/terms": "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 -"}
	claims := fencing.Set{
		{
			Resource: "a", Token: 33, Space: "etcd-1", Sequence: 7, Generation: fencing.Generation{Number: 1, ID: id}, Nonce: id,
		}, {Resource: "b", Token: 34, Space: "etcd-1"},
	}
	if _, err := guard.Do(t.Context(), claims, nil, clientv3.OpPut("config", "new")); err != nil {
		t.Error(err)
	}
	r.keys = map[string]string{
		"fencing/terms": "2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 =etcd-1", "fencing/resources/a": "0 0 33 - 7",
	}
	title("a check of a token that was seen before")
	if err := guard.Check(t.Context(), fencing.Claim{Resource: "a", Token: 33, Space: "etcd-1"}); err != nil {
		t.Error(err)
	}
	title("accept etcd-2 from token 5 on")
	if err := guard.Accept(t.Context(), "etcd-2", 5); err != nil {
		t.Error(err)
	}
	golden.Compare(t, "etcd.txt", r.out.String())
}
