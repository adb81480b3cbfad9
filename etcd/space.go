package etcd

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strconv"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// space is the token space: random, made once by the first driver that finds none, and kept in a key. A driver plants
// it when it begins and never again: one that has seen the cluster's past must not name a new one after it.
//
// Every transaction that writes a request's key compares it, so that nothing is granted in a store that has another.
type space struct {
	name string // empty until it is known
	text string // the whole value of its key
}

// spaceValue is what stands in the key of the token space.
type spaceValue struct {
	Format  int    `json:"fencelock"` // 1
	Space   string `json:"space"`
	Cluster string `json:"cluster"` // where it was planted: a backup that is restored as another cluster gets another space
}

func (d *Driver) spaceKey() string { return d.prefix + "+space" }

func (h *history) tokenSpace() space {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.space
}

// learnSpace reads the token space, or plants it if the cluster has none. Only what drivers do first calls it.
func (d *Driver) learnSpace(ctx context.Context, resp *clientv3.GetResponse) error {
	kvs, cluster := resp.Kvs, strconv.FormatUint(resp.Header.ClusterId, 16)
	for {
		var stands int64 // the revision of what stands there; 0: nothing
		if len(kvs) > 0 {
			var v spaceValue
			if err := json.Unmarshal(kvs[0].Value, &v); err != nil || v.Format != 1 || v.Space == "" {
				return &backend.ConfigError{
					Setting: d.spaceKey(), Value: fmt.Sprintf("%.64s", kvs[0].Value), Want: "what a driver has written there",
					Why: "it names the token space",
				}
			}
			if v.Cluster == cluster {
				d.history.mu.Lock()
				defer d.history.mu.Unlock()
				if d.history.space.name == "" {
					d.history.space = space{name: v.Space, text: string(kvs[0].Value)}
				}
				return nil
			}
			stands = kvs[0].ModRevision
		}
		text, err := json.Marshal(spaceValue{Format: 1, Space: "etcd-" + rand.Text(), Cluster: cluster})
		if err != nil {
			return err
		}
		put, look := clientv3.OpPut(d.spaceKey(), string(text)), clientv3.OpGet(d.spaceKey())
		cmps := []clientv3.Cmp{asRead(d.spaceKey(), stands)}
		planted, err := d.commit(ctx, cmps, []clientv3.Op{put, look}, []clientv3.Op{look})
		if err != nil {
			return err
		}
		kvs = planted.Responses[len(planted.Responses)-1].GetResponseRange().Kvs
	}
}

// sameSpace is true if the store has the token space that the driver knows.
func (d *Driver) sameSpace() clientv3.Cmp {
	return clientv3.Compare(clientv3.Value(d.spaceKey()), "=", d.history.tokenSpace().text)
}

// checkSpace compares what stands in the key of the token space with what is known of it. Whoever deletes the key, with
// all others for example, ends the time of those who knew it: they cannot tell this from a cluster that was made anew.
func (d *Driver) checkSpace(kvs []*mvccpb.KeyValue) error {
	known, now := d.history.tokenSpace(), "gone"
	if len(kvs) > 0 {
		if string(kvs[0].Value) == known.text {
			return nil
		}
		var v spaceValue
		if now = "unreadable"; json.Unmarshal(kvs[0].Value, &v) == nil {
			now = v.Space
		}
	}
	lost := &backend.HistoryError{What: "token space", Was: known.name, Now: now}
	d.loseHistory(lost)
	return lost
}

var errSameSpace = fmt.Errorf("%w: the comparison of the token space failed, and it is the same", backend.ErrUnavailable)
