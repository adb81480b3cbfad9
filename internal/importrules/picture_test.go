package importrules

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The list of ARCHITECTURE.md matches the tree: it names each package, and each named file exists, in the root
// or in a package of its paragraph.
func TestArchitectureNamesTheTree(t *testing.T) {
	const root = "../.."
	text, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(text), "\n## Where things are\n")
	list, _, _ = strings.Cut(strings.TrimSpace(list), "\n\n")
	named := map[string]bool{".": true}
	files := 0
	for paragraph := range strings.SplitSeq(list, "\n- ") {
		folders := []string{"."}
		for _, code := range regexp.MustCompile("`[^`]+`").FindAllString(paragraph, -1) {
			name := strings.Trim(code, "`")
			if info, err := os.Stat(filepath.Join(root, name)); err == nil && info.IsDir() {
				named[filepath.Clean(name)] = true
				folders = append(folders, name)
			}
			if !strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, ".lua") || strings.HasPrefix(name, "*") {
				continue
			}
			files++
			there := false
			for _, folder := range folders {
				_, err := os.Stat(filepath.Join(root, folder, name))
				there = there || err == nil
			}
			if !there {
				t.Errorf("%s is in none of %q", name, folders)
			}
		}
	}
	if files < 20 {
		t.Errorf("only %d files are named: the list is not read as it is written", files)
	}
	for path := range load(t) {
		folder, ours := strings.CutPrefix(path, module)
		folder = filepath.Clean("./" + folder)
		inner := strings.Contains(strings.TrimPrefix(folder, "internal/"), "internal/")
		story := strings.HasPrefix(folder, "examples/")
		guard := strings.HasPrefix(folder, "fencing/") && strings.HasSuffix(folder, "guard")
		if ours && !inner && !story && !guard && !named[folder] {
			t.Errorf("ARCHITECTURE.md does not name %s", folder)
		}
	}
}
