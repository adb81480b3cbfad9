package etcd

import "go.uber.org/zap"

// quiet keeps the client that Open makes from writing to standard error; its errors reach the callers.
var quiet = zap.NewNop()
