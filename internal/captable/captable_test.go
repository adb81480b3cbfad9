package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/fencelock/fencelock/backend"
)

func TestReadmeTellsWhatDriversDeclare(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	want, err := replaced(text)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, want) {
		t.Error("the table is out of date: go run ./internal/captable README.md")
	}
}

func TestEveryCapabilityHasARow(t *testing.T) {
	var told backend.Capabilities
	for _, row := range rows {
		told |= row.caps
	}
	if missing := (^backend.Capabilities(0)).Missing(told); len(missing.All()) > 0 {
		t.Errorf("not in the table: %v", missing)
	}
}
