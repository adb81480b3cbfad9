// Command measure prints the size of each package: lines of code that are no tests, the share of whole-line comments,
// exported names, functions over 80 lines, lines over 120 columns, and blocks of six lines that stand in two places.
// Generated files do not count.
//
//	go run ./internal/measure [FOLDER...]
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

const (
	longFunction = 80  // lines
	longLine     = 120 // columns, with tabs of four
	block        = 6   // lines
)

// size is what is printed of one package.
type size struct {
	lines, comments, exported, functions, wide, repeated int
}

func main() {
	folders := os.Args[1:]
	if len(folders) == 0 {
		folders = []string{"."}
	}
	sizes := map[string]*size{}
	places := map[string][]string{} // of a block: the packages in which it stands
	for _, folder := range folders {
		if err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && (entry.Name() == "testdata" || len(entry.Name()) > 1 && entry.Name()[0] == '.'):
				return filepath.SkipDir
			case entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
				return nil
			}
			return measure(path, sizes, places)
		}); err != nil {
			fmt.Fprintln(os.Stderr, "measure:", err)
			os.Exit(1)
		}
	}
	for _, packages := range places {
		if len(packages) > 1 {
			for _, p := range packages {
				sizes[p].repeated++
			}
		}
	}
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	defer func() { _ = out.Flush() }()
	fmt.Fprintln(out, "lines\tcomments\texported\tlong functions\twide lines\trepeated blocks\t  package")
	total := &size{}
	for _, name := range slices.Sorted(maps.Keys(sizes)) {
		s := sizes[name]
		s.print(out, name)
		total.lines, total.comments, total.exported = total.lines+s.lines, total.comments+s.comments, total.exported+s.exported
		total.functions, total.wide, total.repeated = total.functions+s.functions, total.wide+s.wide, total.repeated+s.repeated
	}
	total.print(out, "all")
}

func (s *size) print(out *tabwriter.Writer, name string) {
	fmt.Fprintf(out, "%d\t%d %%\t%d\t%d\t%d\t%d\t  %s\n",
		s.lines, 100*s.comments/max(1, s.lines), s.exported, s.functions, s.wide, s.repeated, name)
}

func measure(path string, sizes map[string]*size, places map[string][]string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, text, parser.ParseComments)
	if err != nil {
		return err
	}
	if ast.IsGenerated(file) {
		return nil
	}
	name := filepath.Dir(path)
	s := sizes[name]
	if s == nil {
		s = &size{}
		sizes[name] = s
	}
	var code []string // without blank lines and comments
	for in := bufio.NewScanner(bytes.NewReader(text)); in.Scan(); {
		line := in.Text()
		s.lines++
		if utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    ")) > longLine {
			s.wide++
		}
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "//"):
			s.comments++
		case line != "":
			code = append(code, line)
		}
	}
	for i := 0; i+block <= len(code); i++ {
		some := strings.Join(code[i:i+block], "\n")
		if len(some) > 15*block { // not a row of braces, or of imports
			places[some] = append(places[some], name)
		}
	}
	internal := strings.Contains(name, "internal") || file.Name.Name == "main"
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			if f.Name.IsExported() && !internal {
				s.exported++
			}
			if files.Position(f.End()).Line-files.Position(f.Pos()).Line > longFunction {
				s.functions++
			}
			continue
		}
		for _, spec := range d.(*ast.GenDecl).Specs {
			var names []*ast.Ident
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				names = []*ast.Ident{spec.Name}
			case *ast.ValueSpec:
				names = spec.Names
			}
			for _, n := range names {
				if n.IsExported() && !internal {
					s.exported++
				}
			}
		}
	}
	return nil
}
