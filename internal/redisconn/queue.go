package redisconn

import (
	"context"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// Queue reads the first waiters of a name, for people. It is a list, or a sorted set with a mark at its head while the
// name is used for permits; if a type changes in between, no waiter is shown.
func Queue(ctx context.Context, client goredis.Cmdable, keys redisscript.Keys) ([]backend.Waiter, error) {
	places, err := client.LRange(ctx, keys.Queue, 0, backend.MaxQueue-1).Result()
	if goredis.HasErrorPrefix(err, "WRONGTYPE") {
		places, err = client.ZRange(ctx, keys.Queue, 0, backend.MaxQueue).Result()
		if goredis.HasErrorPrefix(err, "WRONGTYPE") {
			return nil, nil
		}
	}
	if err != nil {
		return nil, err
	}
	var all []backend.Waiter
	for _, place := range places {
		h, ok := redisscript.ParseHold(place)
		if !ok {
			continue // the mark of permits, or foreign
		}
		w := backend.Waiter{Owner: h.Owner, HoldID: h.ID, Permits: h.Permits, Limit: h.Limit}
		switch {
		case h.Shared:
			w.Kind = backend.KindShared
		case h.Permits > 0:
			w.Kind = backend.KindPermits
		}
		all = append(all, w)
	}
	return all, nil
}
