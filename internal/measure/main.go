// Command measure prints the size of each package: lines of code that are no tests, the share of whole-line comments,
// exported names, functions over 80 lines, lines over 120 columns, and runs of six lines or more that stand in two
// places; with -repeats it says where these are. Generated files do not count, nor do imports as repeated.
//
//	go run ./internal/measure [-repeats] [FOLDER...]
//	go run ./internal/measure -start
//	go run ./internal/measure -scrape
//
// The second form measures how long the command-line program takes to start, and the third one how long /metrics of a
// server with 100,000 locks takes, and its cost to others.
package main

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
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

// size has the printed figures of one package.
type size struct {
	lines, comments, exported, functions, wide, repeated int
}

func main() {
	show := flag.Bool("repeats", false, "say where the repeated blocks are")
	start := flag.Bool("start", false, "measure the start of the command-line program instead")
	scrapes := flag.Bool("scrape", false, "measure scrapes of a server instead, in two minutes")
	flag.Parse()
	other := (func(context.Context, io.Writer) error)(nil)
	switch {
	case *start:
		other = measureStarts
	case *scrapes:
		other = measureScrapes
	}
	if other != nil {
		if err := other(context.Background(), os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "measure:", err)
			os.Exit(1)
		}
		return
	}
	folders := flag.Args()
	if len(folders) == 0 {
		folders = []string{"."}
	}
	sizes := map[string]*size{}
	var sources []source
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
			sources, err = measure(path, sizes, sources)
			return err
		}); err != nil {
			fmt.Fprintln(os.Stderr, "measure:", err)
			os.Exit(1)
		}
	}
	for _, at := range repeats(sources) {
		sizes[filepath.Dir(at.path)].repeated++
		if *show {
			fmt.Printf("%s:%d: %d lines of code stand elsewhere too\n", at.path, at.number, at.lines)
		}
	}
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	defer func() { _ = out.Flush() }()
	fmt.Fprintln(out, "lines\tcomments\texported\tlong functions\twide lines\trepeated blocks\t  package")
	total := &size{}
	for _, name := range slices.Sorted(maps.Keys(sizes)) {
		s := sizes[name]
		s.print(out, name)
		total.lines, total.comments, total.exported = total.lines+s.lines, total.comments+s.comments,
			total.exported+s.exported
		total.functions, total.wide, total.repeated = total.functions+s.functions, total.wide+s.wide,
			total.repeated+s.repeated
	}
	total.print(out, "all")
}

func (s *size) print(out *tabwriter.Writer, name string) {
	fmt.Fprintf(out, "%d\t%d %%\t%d\t%d\t%d\t%d\t  %s\n",
		s.lines, 100*s.comments/max(1, s.lines), s.exported, s.functions, s.wide, s.repeated, name)
}

// source is the code of one file, without imports, blank lines and comments.
type source struct {
	path    string
	code    []string
	numbers []int // of the lines in the file
}

// repeated is a run of lines that all stand in blocks that are repeated.
type repeated struct {
	path          string
	number, lines int
}

// repeats returns the longest runs of lines of which each block stands somewhere else, too.
func repeats(sources []source) (found []repeated) {
	count := map[string]int{}
	each := func(of source, do func(i int, text string)) {
		for i := 0; i+block <= len(of.code); i++ {
			if text := strings.Join(of.code[i:i+block], "\n"); len(text) > 15*block { // not a row of braces
				do(i, text)
			}
		}
	}
	for _, of := range sources {
		each(of, func(_ int, text string) { count[text]++ })
	}
	for _, of := range sources {
		last := -2
		each(of, func(i int, text string) {
			switch {
			case count[text] < 2:
				return
			case last == i-1:
				found[len(found)-1].lines++
			default:
				found = append(found, repeated{of.path, of.numbers[i], block})
			}
			last = i
		})
	}
	return found
}

func measure(path string, sizes map[string]*size, sources []source) ([]source, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, text, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	if ast.IsGenerated(file) {
		return sources, nil
	}
	name := filepath.Dir(path)
	s := sizes[name]
	if s == nil {
		s = &size{}
		sizes[name] = s
	}
	of, number, imports := source{path: path}, 0, 0
	for _, i := range file.Imports {
		imports = files.Position(i.End()).Line
	}
	for in := bufio.NewScanner(bytes.NewReader(text)); in.Scan(); {
		line := in.Text()
		s.lines++
		number++
		if utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    ")) > longLine {
			s.wide++
		}
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "//"):
			s.comments++
		case line != "" && number > imports:
			of.code, of.numbers = append(of.code, line), append(of.numbers, number)
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
	return append(sources, of), nil
}
