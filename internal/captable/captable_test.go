package main

import (
	"bytes"
	"os"
	"reflect"
	"testing"

	"github.com/fencelock/fencelock/backend"
)

func TestReadmeMatchesDeclarations(t *testing.T) {
	text, err := os.ReadFile("../../docs/DRIVERS.md")
	if err != nil {
		t.Fatal(err)
	}
	want, err := replaced(text)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, want) {
		t.Error("the table is out of date: go run ./internal/captable docs/DRIVERS.md")
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

// Every field of Shows has a row: setting it alone changes the table.
func TestEveryShownFieldHasARow(t *testing.T) {
	var set func(v reflect.Value, all *backend.Shows)
	set = func(v reflect.Value, all *backend.Shows) {
		for i := range v.NumField() {
			field := v.Field(i)
			if field.Kind() == reflect.Struct {
				set(field, all)
				continue
			}
			field.SetBool(true)
			seen := false
			for _, row := range shown {
				look, list := row.is(all)
				seen = seen || look || list
			}
			if !seen {
				t.Errorf("%s is in no row", v.Type().Field(i).Name)
			}
			field.SetBool(false)
		}
	}
	var all backend.Shows
	set(reflect.ValueOf(&all).Elem(), &all)
}
