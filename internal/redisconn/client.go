package redisconn

// This file has the checks of both drivers on the clients that New gets. They take any UniversalClient of
// go-redis, so that a missing method shows at run time only.

import (
	"fmt"
	"reflect"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend/kit"
)

// CheckClient refuses no client at all: nil, and a nil pointer of any type, which is not nil as an interface and would
// end in a panic at the first call. The error names what was given.
func CheckClient(c goredis.UniversalClient) error {
	v := reflect.ValueOf(c)
	if c != nil && (v.Kind() != reflect.Pointer || !v.IsNil()) {
		return nil
	}
	value := "nil"
	if c != nil {
		value = fmt.Sprintf("(%T)(nil)", c)
	}
	return kit.InvalidOption("client", value, "New needs a go-redis client")
}

const (
	// DefaultPrefix starts every key and channel unless Options.KeyPrefix does.
	DefaultPrefix = "fencelock:"
	// NoBraces is why a prefix with braces is refused.
	NoBraces = "braces are the hash tag of a lock's keys"
)
