// Package kept takes down how package log is set up, before github.com/coreos/pkg/capnslog changes that.
//
// It imports package log alone, and is therefore initialized before log/syslog, which capnslog imports: of the packages
// that are ready the one with the first path is initialized next, and log/syslog is not ready before package log is.
package kept

import "log"

var (
	flags  = log.Flags()
	prefix = log.Prefix()
	writer = log.Writer()
)

// Restore sets package log up as it was.
func Restore() {
	log.SetFlags(flags)
	log.SetPrefix(prefix)
	log.SetOutput(writer)
}
