package containers

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
)

const (
	module       = "github.com/fencelock/fencelock"
	runnerModule = module + "/conformance/containers/runner"
)

// runnerProgram returns the path of the program runner. It builds the program from the module beside this package,
// unless a test of this user has built it before. The module cache does not have that module beside this package:
// then it installs the runner of the same version. Neither way touches the go.mod of the tests.
var runnerProgram = sync.OnceValues(func() (string, error) {
	path, err := findRunner()
	if err != nil {
		return "", fmt.Errorf("build the program that runs containers: %w", err)
	}
	return path, nil
})

func findRunner() (string, error) {
	_, file, _, _ := runtime.Caller(0)
	if dir := filepath.Join(filepath.Dir(file), "runner"); isModule(dir) {
		return buildRunner(dir)
	}
	// Built with -trimpath, or in the module cache.
	text, err := goCommand("", "list", "-m", "-json", module)
	if err != nil {
		return "", err
	}
	type place struct {
		Dir, Version string
		Replace      *place
	}
	var found place
	if err := json.Unmarshal(text, &found); err != nil {
		return "", err
	}
	found = *cmp.Or(found.Replace, &found)
	if dir := filepath.Join(found.Dir, "conformance", "containers", "runner"); isModule(dir) {
		return buildRunner(dir)
	}
	return installRunner(found.Version)
}

func isModule(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

// buildRunner builds the module in dir.
func buildRunner(dir string) (string, error) {
	sum := sha256.New()
	fmt.Fprintln(sum, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	err := fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(dir, path))
		fmt.Fprintln(sum, path, len(text), string(text))
		return err
	})
	if err != nil {
		return "", err
	}
	return cached(hex.EncodeToString(sum.Sum(nil)[:8]), func(to string) error {
		_, err := goCommand(dir, "build", "-buildvcs=false", "-o", to+string(filepath.Separator), ".")
		return err
	})
}

// pseudo matches a version that names a commit. The runner has another pseudo-version for that commit.
var pseudo = regexp.MustCompile(`[-.]\d{14}-([0-9a-f]{12})$`)

// query returns the version query for the runner's module that matches a version of this module.
func query(version string) string {
	if commit := pseudo.FindStringSubmatch(version); commit != nil {
		return commit[1]
	}
	return version
}

// installRunner installs the runner that matches a version of this module.
func installRunner(version string) (string, error) {
	if version == "" {
		return "", errors.New("its module is not there, and the version of " + module + " is unknown")
	}
	version = query(version)
	return cached(version, func(to string) error {
		_, err := goCommand(to, "install", "-buildvcs=false", runnerModule+"@"+version)
		return err
	})
}

// cached returns the program of a key. The first call has build write it to a folder. Concurrent tests of other
// packages wait for it.
func cached(key string, build func(folder string) error) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cache = filepath.Join(cache, "fencelock", "runner")
	program := filepath.Join(cache, key, "runner")
	if runtime.GOOS == "windows" {
		program += ".exe"
	}
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return "", err
	}
	unlock, err := lock(filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	folder, err := os.MkdirTemp(cache, "new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(folder)
	if err := build(folder); err != nil {
		return "", err
	}
	return program, os.Rename(folder, filepath.Dir(program))
}

// goCommand runs the go command in a folder, without the flags set for the tests.
func goCommand(dir string, args ...string) ([]byte, error) {
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	if dir != "" {
		cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false", "GOWORK=off", "GOBIN="+dir)
	}
	out, err := cmd.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		err = fmt.Errorf("%w\n%s", err, failed.Stderr)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	return out, nil
}
