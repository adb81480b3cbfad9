// Command site makes a website of the project's Markdown files: README.md, docs, docs/tasks, docs/decisions and the
// other pages that contents lists. The pages load nothing from other hosts.
//
//	cd docs/site && go run . -o DIRECTORY
package main

import (
	"bytes"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"html/template"
	"maps"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
)

// source is where links to files that are no pages lead.
const source = "https://github.com/fencelock/fencelock/blob/main/"

// section is a heading of the navigation and its pages, as paths in the repository. A folder stands for its pages.
type section struct {
	Title string
	files []string
	Pages []*page
}

func contents() []*section {
	return []*section{
		{Title: "Start", files: []string{"README.md", "docs/GUIDE.md", "docs/DRIVERS.md", "examples/README.md"}},
		{Title: "Tasks", files: []string{"docs/tasks", "docs/MIGRATING.md"}},
		{Title: "Fencing", files: []string{"docs/FENCING.md", "docs/FENCING-SPEC.md"}},
		{Title: "Operate", files: []string{
			"docs/SERVER.md", "docs/EMBEDDED.md", "docs/CLI.md", "docs/HTTP.md", "docs/SECURITY.md", "docs/OBSERVABILITY.md",
			"docs/RUNBOOKS.md", "docs/AVAILABILITY.md", "docs/UPGRADE.md",
		}},
		{Title: "How we know", files: []string{"docs/RELIABILITY.md", "docs/MECHANISMS.md", "bench/RESULTS.md"}},
		{Title: "Develop", files: []string{
			"ARCHITECTURE.md", "docs/GLOSSARY.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md",
		}},
		{Title: "Decisions", files: []string{"docs/decisions"}},
	}
}

// page is one Markdown file.
type page struct {
	file     string // in the repository
	Path     string // on the site
	Title    string
	markdown []byte
	tree     ast.Node
	anchors  map[string]bool
	images   map[string]string // files in the repository, by their paths on the site
}

//go:embed page.html
var layout string

//go:embed style.css
var style []byte

var markdown = goldmark.New(
	goldmark.WithExtensions(extension.GFM), goldmark.WithParserOptions(parser.WithAutoHeadingID()),
)

func main() {
	root := flag.String("root", "../..", "the repository's `folder`")
	to := flag.String("o", "", "the `folder` to write to")
	flag.Parse()
	if *to == "" {
		fmt.Fprintln(os.Stderr, "site: -o is missing")
		os.Exit(2)
	}
	if err := build(*root, *to); err != nil {
		fmt.Fprintln(os.Stderr, "site:", err)
		os.Exit(1)
	}
}

// build writes the site. Links that lead nowhere are errors.
func build(root, to string) error {
	sections, pages, err := read(root)
	if err != nil {
		return err
	}
	shape, err := template.New("page").Parse(layout)
	if err != nil {
		return err
	}
	var broken []error
	for _, p := range pages {
		broken = append(broken, p.link(root, pages)...)
	}
	if err := errors.Join(broken...); err != nil {
		return err
	}
	for _, p := range pages {
		var body, whole bytes.Buffer
		if err := markdown.Renderer().Render(&body, p.markdown, p.tree); err != nil {
			return fmt.Errorf("%s: %w", p.file, err)
		}
		// On a phone a wide table scrolls, and not the page.
		html := strings.ReplaceAll(body.String(), "<table>", `<div class="wide"><table>`)
		html = strings.ReplaceAll(html, "</table>", "</table></div>")
		err := shape.Execute(&whole, map[string]any{
			"Title": p.Title, "Sections": sections, "Path": p.Path, "Root": strings.Repeat("../", strings.Count(p.Path, "/")),
			"Body": template.HTML(html), // of our own files
		})
		if err != nil {
			return fmt.Errorf("%s: %w", p.file, err)
		}
		if err := write(filepath.Join(to, p.Path), whole.Bytes()); err != nil {
			return err
		}
		for on, file := range p.images {
			content, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				return err
			}
			if err := write(filepath.Join(to, on), content); err != nil {
				return err
			}
		}
	}
	return write(filepath.Join(to, "style.css"), style)
}

func write(file string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, content, 0o644)
}

// read parses all pages. It returns them by file, too.
func read(root string) ([]*section, map[string]*page, error) {
	sections, pages := contents(), map[string]*page{}
	for _, s := range sections {
		for _, name := range s.files {
			files := []string{name}
			if !strings.HasSuffix(name, ".md") {
				found, err := filepath.Glob(filepath.Join(root, name, "*.md"))
				if err != nil || len(found) == 0 {
					return nil, nil, fmt.Errorf("%s has no pages: %w", name, errors.Join(err))
				}
				files = nil
				for _, file := range found {
					files = append(files, path.Join(name, filepath.Base(file)))
				}
			}
			for _, file := range files {
				p, err := parse(root, file)
				if err != nil {
					return nil, nil, err
				}
				for _, other := range pages {
					if other.Path == p.Path {
						return nil, nil, fmt.Errorf("%s and %s have one path on the site", other.file, file)
					}
				}
				s.Pages, pages[file] = append(s.Pages, p), p
			}
		}
	}
	return sections, pages, nil
}

func parse(root, file string) (*page, error) {
	content, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return nil, err
	}
	p := &page{file: file, markdown: content, anchors: map[string]bool{}, images: map[string]string{}}
	p.Path = strings.ToLower(strings.TrimSuffix(strings.TrimPrefix(file, "docs/"), ".md")) + ".html"
	switch {
	case file == "README.md":
		p.Path = "index.html"
	case !strings.Contains(file, "/"): // docs may have a file of the same name
		p.Path = "project/" + p.Path
	}
	p.tree = markdown.Parser().Parse(text.NewReader(content))
	return p, ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		heading, ok := n.(*ast.Heading)
		if !ok || !entering {
			return ast.WalkContinue, nil
		}
		if heading.Level == 1 && p.Title == "" {
			p.Title = plain(heading, content)
		}
		if id, ok := heading.AttributeString("id"); ok {
			p.anchors[string(id.([]byte))] = true
		}
		return ast.WalkContinue, nil
	})
}

// plain returns the text of a node without its markup.
func plain(n ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if t, ok := n.(*ast.Text); ok && entering {
			b.Write(t.Segment.Value(source))
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// external is a link to another host.
var external = regexp.MustCompile(`^[a-z]+:`)

// link makes the relative links of a page lead to pages of the site or else to the source, and returns those that lead
// nowhere.
func (p *page) link(root string, pages map[string]*page) (broken []error) {
	_ = ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if image, ok := n.(*ast.Image); ok && entering {
			if err := p.picture(image, root); err != nil {
				broken = append(broken, fmt.Errorf("%s: image %s: %w", p.file, image.Destination, err))
			}
		}
		link, ok := n.(*ast.Link)
		if !ok || !entering || external.Match(link.Destination) {
			return ast.WalkContinue, nil
		}
		to, err := p.target(string(link.Destination), root, pages)
		if err != nil {
			broken = append(broken, fmt.Errorf("%s: link to %s: %w", p.file, link.Destination, err))
		}
		link.Destination = []byte(to)
		return ast.WalkContinue, nil
	})
	return broken
}

// picture takes an image of the repository onto the site, at the same place beside its page.
func (p *page) picture(image *ast.Image, root string) error {
	if external.Match(image.Destination) {
		return errors.New("it is on another host")
	}
	file := path.Join(path.Dir(p.file), string(image.Destination))
	if _, err := os.Stat(filepath.Join(root, file)); err != nil {
		return err
	}
	p.images[path.Join(path.Dir(p.Path), string(image.Destination))] = file
	return nil
}

// target returns where a relative link of the page leads on the site.
func (p *page) target(link, root string, pages map[string]*page) (string, error) {
	u, err := url.Parse(link)
	if err != nil {
		return "", err
	}
	to, file := p, p.file
	if u.Path != "" {
		file = path.Join(path.Dir(p.file), u.Path)
		to = pages[file]
	}
	if to == nil { // a file that is no page
		if _, err := os.Stat(filepath.Join(root, file)); err != nil {
			return "", err
		}
		return source + file, nil
	}
	if u.Fragment != "" && !to.anchors[u.Fragment] {
		return "", fmt.Errorf("%s has no heading %s; it has %v", to.file, u.Fragment, slices.Sorted(maps.Keys(to.anchors)))
	}
	relative, err := filepath.Rel(filepath.Dir(p.Path), to.Path)
	if err != nil {
		return "", err
	}
	u.Path = filepath.ToSlash(relative)
	return u.String(), nil
}
