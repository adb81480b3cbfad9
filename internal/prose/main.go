// Command prose counts phrases that make the project's English hard to read: in comments and messages of Go files that
// are no tests, and in the text of Markdown files. It fails when a phrase is more frequent than its limit.
//
//	go run ./internal/prose [-where] [-only PHRASE] [PATH...]
package main

import (
	"bytes"
	_ "embed"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// limits has one phrase per line, after the maximum per 10,000 words: at most three times the rate of nine well-read Go
// projects, and close to the current rate, so that a phrase does not return.
//
//go:embed limits.txt
var limits string

// phrase is one line of limits.txt.
type phrase struct {
	text  string
	limit float64 // per 10,000 words
	match *regexp.Regexp
	count int
}

// passage is a piece of prose and where it begins.
type passage struct {
	path string
	line int
	text string
}

func main() {
	where := flag.Bool("where", false, "print each place of each phrase")
	only := flag.String("only", "", "count this phrase alone")
	flag.Parse()
	roots := flag.Args()
	if len(roots) == 0 {
		roots = []string{"."}
	}
	failed, err := run(roots, *only, *where)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(2)
	}
	if failed {
		os.Exit(1)
	}
}

func run(roots []string, only string, where bool) (failed bool, err error) {
	phrases, err := readLimits(limits)
	if err != nil {
		return false, err
	}
	if only != "" {
		phrases = slices.DeleteFunc(phrases, func(p *phrase) bool { return p.text != only })
		if len(phrases) == 0 {
			return false, fmt.Errorf("-only: limits.txt has no phrase %q", only)
		}
	}
	var passages []passage
	for _, root := range roots {
		found, err := read(root)
		if err != nil {
			return false, err
		}
		passages = append(passages, found...)
	}
	words := 0
	for _, p := range passages {
		words += len(strings.Fields(p.text))
		for _, x := range phrases {
			for _, at := range x.match.FindAllStringIndex(p.text, -1) {
				x.count++
				if where {
					fmt.Printf("%s:%d: %s\n", p.path, p.line+strings.Count(p.text[:at[0]], "\n"), x.text)
				}
			}
		}
	}
	if words == 0 {
		return false, fmt.Errorf("no prose in %s", strings.Join(roots, ", "))
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "phrase\tcount\tper 10,000\tlimit\t\n")
	for _, x := range phrases {
		rate, verdict := float64(x.count)*10_000/float64(words), ""
		if rate > x.limit {
			failed, verdict = true, "too many"
		}
		fmt.Fprintf(w, "%s\t%d\t%.1f\t%.1f\t%s\n", x.text, x.count, rate, x.limit, verdict)
	}
	fmt.Fprintf(w, "words\t%d\t\t\t\n", words)
	return failed, w.Flush()
}

// readLimits parses limits.txt.
func readLimits(text string) ([]*phrase, error) {
	var phrases []*phrase
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		number, words, found := strings.Cut(line, " ")
		limit, err := strconv.ParseFloat(number, 64)
		if err != nil || !found {
			return nil, fmt.Errorf("limits.txt: %q is not a number and a phrase", line)
		}
		pattern := `(?i)\b` + strings.Join(strings.Fields(regexp.QuoteMeta(words)), `\s+(?://\s*)?`) + `\b`
		phrases = append(phrases, &phrase{text: words, limit: limit, match: regexp.MustCompile(pattern)})
	}
	return phrases, nil
}

// read returns the prose below root, or of the file root.
func read(root string) ([]passage, error) {
	var passages []passage
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		name := entry.Name()
		switch {
		case err != nil:
			return err
		case entry.IsDir():
			if name == "testdata" || len(name) > 1 && name[0] == '.' || path != root && name == "decisions" {
				return filepath.SkipDir
			}
			return nil
		case strings.HasSuffix(name, ".md"):
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			passages = append(passages, passage{path, 1, withoutCode(string(text))})
		case strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go"):
			found, err := fromGo(path)
			if err != nil {
				return err
			}
			passages = append(passages, found...)
		}
		return nil
	})
	return passages, err
}

var codeSpan = regexp.MustCompile("`[^`\n]*`")

// withoutCode blanks code blocks and code spans, and keeps the lines.
func withoutCode(text string) string {
	var b strings.Builder
	inside := false
	for line := range strings.Lines(text) {
		fence := strings.HasPrefix(strings.TrimSpace(line), "```")
		if fence {
			inside = !inside
		}
		if fence || inside {
			line = "\n"
		}
		b.WriteString(codeSpan.ReplaceAllString(line, "x"))
	}
	return b.String()
}

// generated matches the header of a generated file.
var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// fromGo returns the comments of a file and the messages in it: strings of three words or more.
func fromGo(path string) ([]passage, error) {
	source, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if generated.Match(source) || bytes.HasPrefix(source, []byte("//go:build ignore")) {
		return nil, nil
	}
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var passages []passage
	for _, group := range file.Comments {
		text := string(source[files.Position(group.Pos()).Offset:files.Position(group.End()).Offset])
		passages = append(passages, passage{path, files.Position(group.Pos()).Line, text})
	}
	ast.Inspect(file, func(n ast.Node) bool {
		literal, ok := n.(*ast.BasicLit)
		if !ok || literal.Kind != token.STRING {
			return true
		}
		if text, err := strconv.Unquote(literal.Value); err == nil && len(strings.Fields(text)) >= 3 {
			passages = append(passages, passage{path, files.Position(literal.Pos()).Line, text})
		}
		return true
	})
	return passages, nil
}
