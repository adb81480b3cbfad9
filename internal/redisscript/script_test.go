package redisscript

import (
	"strings"
	"testing"
	"time"
)

// tag is what a cluster hashes of a key: the text between the first opening brace and the first closing one after it,
// if there is any, else all of it.
func tag(key string) string {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if inside, _, ok := strings.Cut(rest, "}"); ok && inside != "" {
			return inside
		}
	}
	return key
}

func TestKeysAreInjectiveAndShareASlot(t *testing.T) {
	names := []string{
		"a", "a:q", "a:s", "{a}", "a}", "{a", "{", "}", "{}", "}{", "%", "%7B", "%7D", "%25", "%257B", "a{b}c",
		"a}:q", "a%7D:q", "a/b", "a:b", "a%2Fb", " ", "*", "..", "é", "ü{", strings.Repeat("}", 512),
	}
	seen := map[string]string{}
	for _, name := range names {
		k := KeysOf("fencelock:", name)
		for _, key := range []string{k.Lock, k.Queue, k.Seen} {
			if other, dup := seen[key]; dup {
				t.Errorf("%q and %q meet on %q", name, other, key)
			}
			seen[key] = name
			if tag(key) != tag(k.Lock) || tag(key) == key {
				t.Errorf("%q: tag of %q is %q", name, key, tag(key))
			}
		}
		if KeysOfLock(k.Lock) != k {
			t.Errorf("%q: %v, %v", name, KeysOfLock(k.Lock), k)
		}
	}
}

func FuzzKeysOf(f *testing.F) {
	f.Add("a", "{a}")
	f.Add("%7B", "{")
	f.Fuzz(func(t *testing.T, a, b string) {
		ka, kb := KeysOf("p:", a), KeysOf("p:", b)
		if (a == b) != (ka == kb) || a != b && (ka.Lock == kb.Queue || ka.Lock == kb.Lock || ka.Seen == kb.Queue) {
			t.Errorf("%q and %q: %v, %v", a, b, ka, kb)
		}
	})
}

func TestPushes(t *testing.T) {
	for text, want := range map[string]Push{
		"!12|p:{n}":      {Kind: PushOffered, Nonce: "12", Lock: "p:{n}"},
		"!12|p:{a|b}":    {Kind: PushOffered, Nonce: "12", Lock: "p:{a|b}"},
		"?|p:{a|b}":      {Kind: PushAsked, Lock: "p:{a|b}"},
		"c|p:{a|b}|1500": {Kind: PushClosed, Lock: "p:{a|b}", For: 1500 * time.Millisecond},
	} {
		if got, ok := ParsePush(text); !ok || got != want {
			t.Errorf("%q was read as %+v", text, got)
		}
	}
	for _, text := range []string{"", "x", "12|x", "|x", "c|x", "c|x|y"} {
		if got, ok := ParsePush(text); ok {
			t.Errorf("%q was read as %+v", text, got)
		}
	}
}

func TestMillisRoundsUp(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0", 1: "1", time.Millisecond: "1", time.Millisecond + 1: "2", 24 * time.Hour: "86400000",
	} {
		if got := Millis(d); got != want {
			t.Errorf("%v: %s", d, got)
		}
	}
}

// A lock key gives back its name, and no other key a name.
func TestNamesOfKeys(t *testing.T) {
	for _, name := range []string{"a", "a/b", "{a}", "%7B", "%", "a*?[]^-\\", "世"} {
		key := KeysOf("p:", name).Lock
		if got, ok := NameOf("p:", key); !ok || got != name {
			t.Errorf("NameOf(%q) = %q, %v; want %q", key, got, ok, name)
		}
	}
	for _, key := range []string{"p:{a}:q", "p:{a", "q:{a}", "p:a}", "p:{a}b}", "p:{a%2}", "p:{{a}", "p:{%7b}"} {
		if name, ok := NameOf("p:", key); ok {
			t.Errorf("NameOf(%q) = %q, want none", key, name)
		}
	}
}
