// Package lockpb is the wire protocol of the bundled lock server: lock.proto and admin.proto, which are the
// specification, and the code generated from them.
package lockpb

//go:generate ./generate
