package importrules

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestModulesOfARelease checks that every module of the repository requires the same Go, and requires the root in the
// version of the next release. In a clone, replace directives point to the root. A user's go command ignores them and
// asks for the version: `go get …/observe@v0.1.0` must select a root that exists.
func TestModulesOfARelease(t *testing.T) {
	root := output(t, ".", "go", "list", "-m", "-f", "{{.Dir}}", module)
	source, err := os.ReadFile(filepath.Join(root, "cmd", "fencelock", "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	upcoming := regexp.MustCompile(`(?m)^const upcoming = "(v\d+\.\d+\.\d+)-devel"$`).FindSubmatch(source)
	if upcoming == nil {
		t.Fatal("cmd/fencelock/main.go has no constant upcoming of the form vX.Y.Z-devel")
	}
	want := map[string]string{"go": goVersion(t, filepath.Join(root, "go.mod")), module: string(upcoming[1])}
	line := regexp.MustCompile(`^(?:require )?(go|` + regexp.QuoteMeta(module) + `) (\S+)$`)
	modules := 0
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata") && path != root:
			return filepath.SkipDir
		case entry.Name() != "go.mod":
			return nil
		}
		modules++
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for l := range strings.Lines(string(text)) {
			if found := line.FindStringSubmatch(strings.TrimSpace(l)); found != nil && found[2] != want[found[1]] {
				t.Errorf("%s requires %s %s, want %s", path, found[1], found[2], want[found[1]])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if modules < 2 {
		t.Fatalf("found %d modules below %s", modules, root)
	}
}

func goVersion(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^go (\S+)$`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("%s has no go line", path)
	}
	return string(found[1])
}
