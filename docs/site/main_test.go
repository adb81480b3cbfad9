package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every Markdown file of docs is on the site, every link leads somewhere, and no page asks another host for anything.
func TestSite(t *testing.T) {
	to := t.TempDir()
	if err := build("../..", to); err != nil {
		t.Fatal(err)
	}
	_, pages, err := read("../..")
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir("..", func(file string, entry fs.DirEntry, err error) error {
		name := filepath.ToSlash(filepath.Join("docs", strings.TrimPrefix(file, "..")))
		if err == nil && strings.HasSuffix(file, ".md") && pages[name] == nil {
			t.Errorf("%s is not on the site: enter it in contents", name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	// What a browser loads by itself.
	loads := regexp.MustCompile(`(?i)<(script|iframe|object|embed|video|audio|source|form)\b|<(link|img)[^>]*="https?:`)
	for _, p := range pages {
		text, err := os.ReadFile(filepath.Join(to, p.Path))
		if err != nil {
			t.Fatal(err)
		}
		if p.Title == "" {
			t.Errorf("%s has no title", p.file)
		}
		if found := loads.Find(text); found != nil {
			t.Errorf("%s: %s", p.Path, found)
		}
		for image := range p.images {
			if _, err := os.Stat(filepath.Join(to, image)); err != nil {
				t.Error(err)
			}
		}
	}
	if found := regexp.MustCompile(`url\(|@import`).Find(style); found != nil {
		t.Errorf("style.css: %s", found)
	}
}

// A link that leads nowhere is refused, and one to a file that is no page leads to the source.
func TestLinks(t *testing.T) {
	_, pages, err := read("../..")
	if err != nil {
		t.Fatal(err)
	}
	from := pages["docs/tasks/cron.md"]
	for link, want := range map[string]string{
		"money-transfer.md":   "money-transfer.html",
		"../../README.md":     "../index.html",
		"../SERVER.md":        "../server.html",
		"../../examples/cron": source + "examples/cron",
	} {
		if got, err := from.target(link, "../..", pages); err != nil || got != want {
			t.Errorf("%s leads to %q, %v; want %q", link, got, err, want)
		}
	}
	for _, link := range []string{"nothing.md", "money-transfer.md#nothing", "#nothing"} {
		if got, err := from.target(link, "../..", pages); err == nil {
			t.Errorf("%s leads to %q", link, got)
		}
	}
}
