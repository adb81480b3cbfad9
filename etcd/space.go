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

// The token space is the name under which guards know this cluster's count of tokens. The cluster id cannot serve: a
// cluster that was wiped and made anew with the same flags has the same id, and a guard once saw token 2 after 302 in
// one space. So the space is random, and a key holds it (docs/decisions/2026-11-22-an-etcd-token-space-is-a-key.md).
//
// The first call of a driver reads it, or plants it in a store without it (learnSpace). From then on every
// transaction that may grant compares the key (sameSpace), and every proof of a lease reads it (checkSpace). A
// surviving client never plants the key a second time: then nobody would notice that it was gone.

// space is the token space: random, made once by the first driver that does not find it, and kept in a key. A driver
// plants it only at its beginning: a driver that has seen the cluster's past must not name a new space.
type space struct {
	name string // empty until it is known
	text string // the whole value of its key
}

// layout is the version of all keys below the prefix, which the token space's key names. A later layout is refused:
// the key has to change with it, and ends the drivers that know the earlier value.
const layout = 1

// spaceValue is the value of the token space's key. Cluster is where it was planted: a backup that is restored
// as another cluster names another one, and the first driver there plants a new space.
type spaceValue struct {
	Format  int    `json:"fencelock"` // layout
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

// learnSpace reads the token space from resp, which is a read of its key, or plants it if the store has no space of
// this cluster. Drivers that begin concurrently agree, because each plants only over the value it has read. Only a
// driver's first calls use it.
func (d *Driver) learnSpace(ctx context.Context, resp *clientv3.GetResponse) error {
	kvs, cluster := resp.Kvs, strconv.FormatUint(resp.Header.ClusterId, 16)
	for {
		// The revision of the standing value; 0 without a value. Planting compares it.
		var stands int64
		if len(kvs) > 0 {
			var v spaceValue
			err := json.Unmarshal(kvs[0].Value, &v)
			if v.Format > layout {
				return &backend.ConfigError{
					Setting: "layout of " + d.spaceKey(), Value: strconv.Itoa(v.Format), Want: strconv.Itoa(layout),
					Why: "a later version of this package wrote it",
				}
			}
			if err != nil || v.Format != layout || v.Space == "" {
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
		text, err := json.Marshal(spaceValue{Format: layout, Space: "etcd-" + rand.Text(), Cluster: cluster})
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

// checkSpace compares the token space's key with the known space, and ends all sessions if they differ. Deleting the
// key, with all others for example, ends the drivers that knew it: they cannot tell this from a new cluster.
// Revisions could show that it is the same cluster only until the next compaction, and idle drivers would need a
// second mechanism.
func (d *Driver) checkSpace(kvs []*mvccpb.KeyValue) error {
	known, now := d.history.tokenSpace(), "gone"
	if len(kvs) > 0 {
		if string(kvs[0].Value) == known.text {
			return nil
		}
		var v spaceValue
		switch err := json.Unmarshal(kvs[0].Value, &v); {
		case v.Format > layout:
			now = fmt.Sprintf("one of layout %d, this program knows %d", v.Format, layout)
		case err != nil:
			now = "unreadable"
		default:
			now = v.Space
		}
	}
	lost := &backend.HistoryError{What: "token space", Was: known.name, Now: now}
	d.loseHistory(lost)
	return lost
}
