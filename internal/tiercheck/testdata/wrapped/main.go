// Command wrapped hands a wrapper that forgot the promise of the driver inside to the correctness tier.
package main

import (
	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

type wrapper struct{ backend.Driver }

func (w wrapper) Unwrap() backend.Driver { return w.Driver }

func main() {
	_, _ = fencelock.ForCorrectness(wrapper{memory.New(nil)}, nil)
}
