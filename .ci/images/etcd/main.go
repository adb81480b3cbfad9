// Command etcd is the server of etcd, built from its own module, for machines that reach a Go module proxy but no image
// registry. It is what go.etcd.io/etcd/server/v3 builds itself.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
