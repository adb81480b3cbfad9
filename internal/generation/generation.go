// Package generation reads the generation of a cluster of the bundled server from the name that its members, its
// backups and its wire protocol have for it.
package generation

import "github.com/fencelock/fencelock/fencing"

// Of returns the generation with the name, which is empty where there was no restore. A restore by an earlier version
// is named by a random id alone, and counts as generation 1.
func Of(name string) fencing.Generation {
	if id, err := fencing.ParseNonce(name); err == nil && name != "" {
		return fencing.Generation{Number: 1, ID: id}
	}
	g, _ := fencing.ParseGeneration(name) // otherwise there was no restore
	return g
}
