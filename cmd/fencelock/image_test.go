//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/testcert"
	"github.com/fencelock/fencelock/internal/testtier"
)

// The image of deploy/Dockerfile becomes healthy as a user without rights, on a file system that it cannot write.
func TestImage(t *testing.T) {
	t.Parallel()
	testtier.Only(t)
	docker := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("docker", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("docker %s: %v: %s", strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
	image := fmt.Sprintf("localhost/fencelock-test:%d", os.Getpid())
	build := exec.Command("./build", image)
	build.Dir = "../../.ci/images/fencelock"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	defer docker("rmi", "-f", image)
	container := docker("run", "-d", "--read-only", "--cap-drop=ALL", image)
	defer docker("rm", "-f", "-v", container)
	eventually(t, "the container is healthy", func() bool {
		return docker("inspect", "-f", "{{.State.Health.Status}}", container) == "healthy"
	})
	if user := docker("inspect", "-f", "{{.Config.User}}", container); user != "65532:65532" {
		t.Errorf("it runs as %q", user)
	}
	out := docker("exec", container, "fencelock", "run", "--backend", localServer, "--name", "x", "--", "fencelock", "version")
	if !strings.Contains(out, "fencelock ") {
		t.Error(out)
	}
}

// The members of deploy/compose-tls.yaml become healthy: the health check speaks TLS with its certificate.
func TestComposeWithTLS(t *testing.T) {
	t.Parallel()
	testtier.Only(t)
	if _, err := exec.LookPath("docker-compose"); err != nil {
		t.Skip("COMPOSE IS NOT TESTED: install docker-compose")
	}
	image, project := fmt.Sprintf("localhost/fencelock-compose:%d", os.Getpid()), fmt.Sprintf("fencelock%d", os.Getpid())
	build := exec.Command("./build", image)
	build.Dir = "../../.ci/images/fencelock"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	tls, authority := t.TempDir(), testcert.New(t)
	copyTo := func(from, to string) {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(tls, to), text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	copyTo(authority.File, "ca.pem")
	members := []string{"member1", "member2", "member3"}
	for _, m := range members {
		cert, key := authority.Sign(t, m)
		copyTo(cert, m+".pem")
		copyTo(key, m+"-key.pem")
	}
	if err := os.Chmod(tls, 0o755); err != nil { // the containers' user reads it
		t.Fatal(err)
	}
	compose := func(args ...string) {
		t.Helper()
		cmd := exec.Command("docker-compose", append([]string{"-p", project, "-f", "../../deploy/compose-tls.yaml"}, args...)...)
		cmd.Env = append(os.Environ(), "FENCELOCK_TLS="+tls, "FENCELOCK_IMAGE="+image)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("docker-compose %q: %v: %s", args, err, out)
		}
	}
	defer exec.Command("docker", "rmi", "-f", image).Run()
	defer compose("down", "-v")
	compose("up", "-d")
	for _, m := range members {
		eventually(t, m+" is healthy", func() bool {
			out, err := exec.Command("docker", "inspect", "-f", "{{.State.Health.Status}}", project+"_"+m+"_1").Output()
			return err == nil && strings.TrimSpace(string(out)) == "healthy"
		})
	}
}
