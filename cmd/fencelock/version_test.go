package main

import (
	"strings"
	"testing"
)

func TestVersionNamesARelease(t *testing.T) {
	if v := version(); !strings.HasPrefix(v, "v") || strings.Count(v, ".") < 2 {
		t.Errorf("version() = %q, want vX.Y.Z", v)
	}
	release = "v1.2.3"
	defer func() { release = "" }()
	if v := version(); v != "v1.2.3" {
		t.Errorf("version() of a release = %q, want v1.2.3", v)
	}
}
