package redisconn

// This file checks the clients that New functions are given: both drivers take any UniversalClient of go-redis, so that
// what is missing shows at run time only.

import (
	"fmt"
	"reflect"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
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
	return &backend.InvalidError{
		Kind: backend.ErrInvalidOption, What: "client", Value: value, Why: "New needs a go-redis client",
	}
}
