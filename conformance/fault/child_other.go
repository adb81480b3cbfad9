//go:build !unix

package fault

import (
	"errors"
	"fmt"
)

var errNoSignals = fmt.Errorf("fault: child processes cannot be paused on this system: %w", errors.ErrUnsupported)

func (c *Child) spawn() error     { return errNoSignals }
func (c *Child) reap(func())      {}
func (c *Child) Pause() error     { return errNoSignals }
func (c *Child) Resume() error    { return errNoSignals }
func (c *Child) Kill() error      { return errNoSignals }
func (c *Child) Terminate() error { return errNoSignals }
