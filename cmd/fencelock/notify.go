package main

import (
	"net"
	"os"
)

// States of the protocol of sd_notify.
const (
	notifyReady    = "READY=1"
	notifyStopping = "STOPPING=1"
)

// notify reports a state to the service manager that has started this program, such as systemd with Type=notify. It
// has no effect without one.
func notify(state string) {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return
	}
	c, err := net.Dial("unixgram", socket)
	if err == nil {
		_, err = c.Write([]byte(state))
		c.Close()
	}
	if err != nil {
		say("NOTIFY_SOCKET: %v", err)
	}
}
