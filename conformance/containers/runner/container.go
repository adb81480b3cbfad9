package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	engine "github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	tclog "github.com/testcontainers/testcontainers-go/log"
)

// pullTimeout bounds the pull of an image.
const pullTimeout = 3 * time.Minute

// errNoEngine means that no Docker engine answers.
var errNoEngine = errors.New("no Docker engine answers")

// container is a server in a container. Testcontainers starts and removes it; operations without a method there
// (pause, kill, restart) use the Docker client behind it.
type container struct {
	spec      Spec
	provider  *testcontainers.DockerProvider
	container testcontainers.Container // nil before the first start and after close
}

func newContainer(ctx context.Context, spec Spec) (*container, error) {
	provider, err := connect(ctx)
	if err != nil {
		return nil, err
	}
	return &container{spec: spec, provider: provider}, nil
}

// connect returns a provider with an engine that answers.
func connect(ctx context.Context) (provider *testcontainers.DockerProvider, err error) {
	defer func() {
		if r := recover(); r != nil { // testcontainers panics if it finds no address of an engine
			provider, err = nil, fmt.Errorf("%w: %v", errNoEngine, r)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tclog.SetDefault(quiet{})
	provider, err = testcontainers.NewDockerProvider()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoEngine, err)
	}
	if _, err := provider.Client().Ping(ctx, client.PingOptions{}); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", errNoEngine, err), provider.Close())
	}
	return provider, nil
}

// quiet discards logs: testcontainers logs every step.
type quiet struct{}

func (quiet) Printf(string, ...any) {}

// pull pulls the image unless the engine has it. Testcontainers would pull it too, but repeats failures for minutes.
func (c *container) pull(ctx context.Context) error {
	docker := c.provider.Client()
	if _, err := docker.ImageInspect(ctx, c.spec.Image); err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pullTimeout)
	defer cancel()
	pull, err := docker.ImagePull(ctx, c.spec.Image, client.ImagePullOptions{})
	if err == nil {
		err = pull.Wait(ctx)
	}
	if err != nil {
		return fmt.Errorf("pull image %s: %w", c.spec.Image, err)
	}
	return nil
}

func (c *container) start(ctx context.Context) (string, error) {
	if c.container != nil {
		// Not testcontainers' Start: that is for a new container.
		if _, err := c.provider.Client().ContainerStart(ctx, c.id(), client.ContainerStartOptions{}); err != nil {
			return "", err
		}
	} else {
		started, err := c.provider.RunContainer(ctx, c.request())
		if started != nil {
			c.container = started
		}
		if err != nil {
			return "", err
		}
	}
	if c.spec.HostNetwork {
		return "", nil
	}
	return c.container.PortEndpoint(ctx, c.spec.Port, "") // a new port after each start
}

func (c *container) request() testcontainers.ContainerRequest {
	r := testcontainers.ContainerRequest{
		Image:      c.spec.Image,
		Entrypoint: c.spec.Entrypoint,
		Cmd:        c.spec.Command,
		Env:        map[string]string{},
	}
	if c.spec.User != "" {
		r.ConfigModifier = func(config *engine.Config) { config.User = c.spec.User }
	}
	for _, each := range c.spec.Environ {
		key, value, _ := strings.Cut(each, "=")
		r.Env[key] = value
	}
	if !c.spec.HostNetwork {
		r.ExposedPorts = []string{c.spec.Port}
		return r
	}
	r.HostConfigModifier = func(host *engine.HostConfig) { host.NetworkMode = "host" }
	// Testcontainers adds its own network, which excludes the host's network.
	r.EndpointSettingsModifier = func(networks map[string]*network.EndpointSettings) { clear(networks) }
	return r
}

func (c *container) id() string { return c.container.GetContainerID() }

func (c *container) ended(ctx context.Context) error {
	state, err := c.container.State(ctx)
	if err != nil || state.Running {
		return err
	}
	return fmt.Errorf("the container has ended with exit code %d", state.ExitCode)
}

// kill returns when the container no longer runs.
func (c *container) kill(ctx context.Context) error {
	docker := c.provider.Client()
	wait := docker.ContainerWait(ctx, c.id(), client.ContainerWaitOptions{})
	if _, err := docker.ContainerKill(ctx, c.id(), client.ContainerKillOptions{Signal: "KILL"}); err != nil {
		return err
	}
	select {
	case <-wait.Result:
		return nil
	case err := <-wait.Error:
		return err
	}
}

// pause retries if the kernel did not freeze all threads within the runtime's time limit, as happens on busy machines
// with control groups v1; the runtime then unfreezes the other threads.
func (c *container) pause(ctx context.Context) error {
	for {
		_, err := c.provider.Client().ContainerPause(ctx, c.id(), client.ContainerPauseOptions{})
		if err == nil || !strings.Contains(err.Error(), "unable to freeze") || ctx.Err() != nil {
			return err
		}
	}
}

func (c *container) resume(ctx context.Context) error {
	_, err := c.provider.Client().ContainerUnpause(ctx, c.id(), client.ContainerUnpauseOptions{})
	return err
}

func (c *container) logs(ctx context.Context) string {
	if c.container == nil {
		return ""
	}
	r, err := c.container.Logs(ctx)
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	text, err := io.ReadAll(r)
	if err != nil {
		return fmt.Sprintf("%s\n%v", text, err)
	}
	return string(text)
}

// close removes the container immediately, with its data.
func (c *container) close(ctx context.Context) error {
	if c.container == nil {
		return nil
	}
	// Terminate would wait for a server that is paused or slow to save. The container may have ended already.
	c.provider.Client().ContainerKill(ctx, c.id(), client.ContainerKillOptions{Signal: "KILL"})
	if err := c.container.Terminate(ctx, testcontainers.StopTimeout(0)); err != nil {
		return err
	}
	c.container = nil
	return nil
}
