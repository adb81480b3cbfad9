package story

// Import the drivers that fencelock.Open should know. A program that knows its backend imports that one alone and
// calls its New.
import (
	_ "github.com/fencelock/fencelock/backend/memory" // memory://name
	_ "github.com/fencelock/fencelock/builtin"        // fencelock://host:port,host:port
	_ "github.com/fencelock/fencelock/etcd"           // etcd://host:port,host:port
	_ "github.com/fencelock/fencelock/postgres"       // postgres://user@host:port/database
	_ "github.com/fencelock/fencelock/redis"          // redis://host:port and its variants
	_ "github.com/fencelock/fencelock/redlock"        // redlock://host:port,host:port,host:port
	_ "github.com/fencelock/fencelock/zookeeper"      // zk://host:port,host:port/chroot
)
