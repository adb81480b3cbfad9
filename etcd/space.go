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

// The token space is the name under which guards know this cluster's count of tokens. It cannot be derived from the
// cluster: the id of a cluster that was wiped and made anew with the same flags is the same, and a guard once saw token
// 2 after 302 in one space. So it is random, and a key holds it
// (docs/decisions/2026-11-22-an-etcd-token-space-is-a-key.md).
//
// The first call of a driver learns it, or plants it in a store that has none (learnSpace). From then on every
// transaction that may grant compares the key (sameSpace), and every proof of a lease reads it (checkSpace). A
// surviving client that plants the key again was rejected: then nobody would notice that it was gone.

// space is the token space: random, made once by the first driver that finds none, and kept in a key. A driver plants
// it when it begins and never again: one that has seen the cluster's past must not name a new one after it.
type space struct {
	name string // empty until it is known
	text string // the whole value of its key
}

// spaceValue is what stands in the key of the token space. Cluster is where it was planted: a backup that is restored
// as another cluster names another one, and the first driver there plants a new space.
type spaceValue struct {
	Format  int    `json:"fencelock"` // 1
	Space   string `json:"space"`
	Cluster string `json:"cluster"` // the id, in hexadecimal
}

// spaceKey is the key of the token space. It lies below the prefix, so deleting everything there deletes it too: see
// checkSpace.
func (d *Driver) spaceKey() string { return d.prefix + "+space" }

// tokenSpace returns the token space; its name is empty until the first call has learnt it.
func (h *history) tokenSpace() space {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.space
}

// learnSpace learns the token space from resp, which is a read of its key, or plants it if the store has none of this
// cluster. Drivers that begin at once agree, because each plants only over what it has read. Only what drivers do first
// calls it.
func (d *Driver) learnSpace(ctx context.Context, resp *clientv3.GetResponse) error {
	kvs, cluster := resp.Kvs, strconv.FormatUint(resp.Header.ClusterId, 16)
	for {
		// The revision at which what stands there was written; 0 if there is nothing. Planting compares it.
		var stands int64
		if len(kvs) > 0 {
			var v spaceValue
			if err := json.Unmarshal(kvs[0].Value, &v); err != nil || v.Format != 1 || v.Space == "" {
				return &backend.ConfigError{
					Setting: d.spaceKey(), Value: fmt.Sprintf("%.64s", kvs[0].Value),
					Want: "what a driver has written there", Why: "it names the token space",
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

// sameSpace is true if the store has the token space that the driver knows. The value is compared whole.
func (d *Driver) sameSpace() clientv3.Cmp {
	return clientv3.Compare(clientv3.Value(d.spaceKey()), "=", d.history.tokenSpace().text)
}

// checkSpace compares what stands in the key of the token space with what is known of it, and ends all sessions if that
// differs. Somebody who deletes the key, with all others for example, ends the time of those who knew it: they cannot
// tell this from a cluster that was made anew. Going on where the revisions show that it is the same cluster was
// rejected: that works until the next compaction only, and needs a second mechanism for those who were idle meanwhile.
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
