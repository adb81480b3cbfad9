//go:build !unix

package proctree

// Tree does not exist on this system.
type Tree struct{}

// Start returns ErrUnsupported.
func Start() (*Tree, error) { return nil, ErrUnsupported }
