//go:build !linux

package stallmeter

import "time"

// waited is not known here.
func waited() time.Duration { return 0 }

// stood is not known here.
func stood() time.Duration { return 0 }
