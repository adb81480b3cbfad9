package etcdguard_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/etcdguard"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/internal/testtier"
)

func TestOlderWriters(t *testing.T) {
	client, err := dial(containers.Etcd(t).Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	long := time.Second
	if testtier.Wanted() {
		long = time.Minute
	}
	guardtest.RunOlder(t, space, long, func(t testing.TB, round int) *guardtest.Older {
		return older(t, client, fmt.Sprintf("fencing-%d/", round))
	})
}

// format1 reads the numbers of version 9d2c49a: EPOCH TOKEN SEQUENCE of a resource, EPOCH FLOOR SPACE of the terms.
func format1(kvs *clientv3.GetResponse) (epoch, token uint64, rest string, revision int64, _ error) {
	if len(kvs.Kvs) == 0 {
		return 0, 0, "", 0, nil
	}
	text := string(kvs.Kvs[0].Value)
	n, err := fmt.Sscanf(text, "%d %d %s", &epoch, &token, &rest)
	if n != 3 || text != fmt.Sprintf("%d %d %s", epoch, token, rest) {
		return 0, 0, "", 0, fmt.Errorf("%q, which no guard wrote (%w)", text, err)
	}
	return epoch, token, rest, kvs.Kvs[0].ModRevision, nil
}

func older(t testing.TB, client *clientv3.Client, prefix string) *guardtest.Older {
	options := &etcdguard.Options{Prefix: prefix}
	guard := must(t, client, options)
	value := "value/" + prefix
	return &guardtest.Older{
		Keeper: guard,
		Keep: func(ctx context.Context, terms fencing.Terms, seen fencing.Seen) error {
			_, err := client.Put(ctx, guard.TermsKey(), fmt.Sprintf("%d %d %s", terms.Epoch, uint64(terms.Floor), terms.Space))
			_, failed := client.Put(ctx, guard.Key("older"),
				fmt.Sprintf("%d %d %d", seen.Epoch, uint64(seen.Token), seen.Sequence))
			return errors.Join(err, failed)
		},
		Old: func(ctx context.Context, c fencing.Claim, text string) error {
			key := guard.Key(c.Resource)
			answer, err := client.Txn(ctx).Then(clientv3.OpGet(guard.TermsKey()), clientv3.OpGet(key)).Commit()
			if err != nil {
				return err
			}
			termsEpoch, floor, space, termsAt, err := format1((*clientv3.GetResponse)(answer.Responses[0].GetResponseRange()))
			if err != nil {
				return err
			}
			epoch, token, _, at, err := format1((*clientv3.GetResponse)(answer.Responses[1].GetResponseRange()))
			if err != nil {
				return err
			}
			ops := []clientv3.Op{
				clientv3.OpPut(key, fmt.Sprintf("%d %d 0", termsEpoch, uint64(c.Token))), clientv3.OpPut(value, text),
			}
			switch {
			case termsAt == 0 && at != 0:
				return errors.New("the terms are lost")
			case termsAt == 0:
				ops = append(ops, clientv3.OpPut(guard.TermsKey(), "0 0 "+c.Space))
			case epoch != termsEpoch || space != c.Space || uint64(c.Token) < max(token, floor):
				return errors.New("refused")
			}
			done, err := client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(guard.TermsKey()), "=", termsAt),
				clientv3.Compare(clientv3.ModRevision(key), "=", at)).Then(ops...).Commit()
			if err == nil && !done.Succeeded {
				err = errors.New("somebody else was faster")
			}
			return err
		},
		New: func(ctx context.Context, c fencing.Claim, text string) error {
			_, err := must(t, client, options).Do(ctx, c, nil, clientv3.OpPut(value, text))
			return err
		},
		Read: func(ctx context.Context) (string, error) {
			answer, err := client.Get(ctx, value)
			if err != nil {
				return "", err
			}
			return string(answer.Kvs[0].Value), nil
		},
	}
}
