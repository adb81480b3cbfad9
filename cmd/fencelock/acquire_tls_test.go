//go:build unix

package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/testcert"
)

// The URL of a gateway has the TLS options of every URL.
func TestAcquireOverTLS(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	cert, key := authority.Sign(t, "localhost")
	gateway := start(t, "gateway", "--backend", startServer(t), "--http-listen", "127.0.0.1:0", "--tls-cert", cert,
		"--tls-key", key, "--tls-client-ca", authority.File)
	addr := gateway.await("fencelock: serving HTTP at ")
	url := "https://localhost" + addr[strings.LastIndex(addr, ":"):]
	token := filepath.Join(t.TempDir(), "token")
	with := func(word, options string) *program {
		return start(t, word, "deploy", "--backend", url+"?"+options, "--token-file", token)
	}
	options := "ca=" + authority.File + "&cert=" + cert + "&key=" + key
	with("acquire", options).expectExit(exitOK)
	with("renew", options).expectExit(exitOK)
	with("release", options).expectExit(exitOK)
	with("acquire", "timeout=2s").expectExit(exitUnavailable, "certificate")
	with("acquire", "ca="+authority.File).expectExit(exitUnavailable)
	with("acquire", options+"&credential="+token).expectExit(exitUsage, "it is not a token")
	with("acquire", "nothing=1").expectExit(exitUsage, "unknown option")
}
