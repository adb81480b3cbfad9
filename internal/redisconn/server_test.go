package redisconn

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

const healthy = "# Server\r\nredis_version:7.2.4\r\nrun_id:abc\r\nuptime_in_seconds:90\r\n# Memory\r\nmaxmemory:0\r\n" +
	"maxmemory_policy:allkeys-lru\r\n# Persistence\r\naof_enabled:1\r\nconnected_slaves:2\r\nrole:master\r\ncluster_enabled:0\r\n"

func TestServerFit(t *testing.T) {
	s := parseInfo(healthy)
	if s.RunID != "abc" || s.Uptime != 90*time.Second || !s.aof || s.Replicas != 2 || s.Cluster || !s.AtLeast(7, 2) ||
		s.AtLeast(7, 3) {
		t.Errorf("INFO was read as %+v", s)
	}
	if err := s.Fit(); err != nil {
		t.Errorf("a healthy server is refused: %v", err)
	}
	for _, unfit := range [][2]string{
		{"7.2.4", "5.0.14"}, {"7.2.4", "unknown"}, {"role:master", "role:slave"}, {"maxmemory:0", "maxmemory:1000"},
	} {
		err := parseInfo(strings.Replace(healthy, unfit[0], unfit[1], 1)).Fit()
		var config *backend.ConfigError
		if !errors.As(err, &config) || !errors.Is(err, backend.ErrMisconfigured) {
			t.Errorf("%s instead of %s: %v, want a ConfigError", unfit[1], unfit[0], err)
		}
	}
}
