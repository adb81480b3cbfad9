//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/server/replica"
)

func TestBackupAndRestore(t *testing.T) {
	t.Parallel()
	p, url := serving(t, "--data-dir", filepath.Join(t.TempDir(), "old"))
	tokenAt(t, url)
	file := filepath.Join(t.TempDir(), "locks.backup")
	all := objects[backup](t, succeed(t, "backup", file, "--backend", url, "--json"))
	info, err := os.Stat(file)
	if err != nil || len(all) != 1 || all[0].Cluster == "" || all[0].Revision == 0 || all[0].Bytes != info.Size() {
		t.Fatalf("printed %+v; the file: %v, %v", all, info, err)
	}
	last := tokenAt(t, url) // issued after the backup
	p.terminate()

	dir := filepath.Join(t.TempDir(), "new")
	if text := succeed(
		t, "restore", file, "--data-dir", dir, "--closed-for", "100ms",
	); !strings.Contains(text, all[0].Cluster) ||
		!strings.Contains(text, "refuses clients for 100ms") {
		t.Errorf("restore prints:\n%s", text)
	}
	start(t, "restore", file, "--data-dir", dir).expectExit(exitNoCreate, "not empty")
	p, url = serving(t, "--data-dir", dir)
	if next := tokenAt(t, url); next <= last+1<<32 {
		t.Errorf("token %d after the restore; %d was issued after the backup", next, last)
	}
	again := filepath.Join(filepath.Dir(file), "again.backup")
	if text := succeed(t, "backup", again, "--backend", url); !strings.Contains(text, all[0].Cluster) {
		t.Errorf("it is another cluster:\n%s", text)
	}
	p.terminate()

	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, whole[:len(whole)-1], 0o600); err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(t.TempDir(), "none")
	start(t, "restore", file, "--data-dir", dir).expectExit(exitNoInput, replica.ErrNoBackup.Error())
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is there: %v", err)
	}
}

// brokenLeader says that it leads, sends a piece of a backup, and ends it with an error or as if that were all.
type brokenLeader struct {
	lockpb.UnimplementedAdminServiceServer
	err error
}

func (b *brokenLeader) Status(context.Context, *lockpb.StatusRequest) (*lockpb.MemberStatus, error) {
	return &lockpb.MemberStatus{NodeId: "x", Leader: true}, nil
}

func (b *brokenLeader) Backup(_ *lockpb.BackupRequest, stream grpc.ServerStreamingServer[lockpb.BackupPiece]) error {
	if err := stream.Send(&lockpb.BackupPiece{Data: []byte("half of it")}); err != nil {
		return err
	}
	return b.err
}

// FILE keeps its content until the new backup is complete.
func TestBackupReplacesOnlyByAWholeOne(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "locks.backup")
	old := []byte("the old one")
	if err := os.WriteFile(file, old, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		sent error
		want string
	}{{status.Error(codes.Internal, "out of paper"), "out of paper"}, {nil, replica.ErrNoBackup.Error()}} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		lockpb.RegisterAdminServiceServer(s, &brokenLeader{err: c.sent})
		var serving sync.WaitGroup
		serving.Go(func() { s.Serve(listener) })
		start(t, "backup", file, "--backend", "fencelock://"+listener.Addr().String()).
			expectExit(exitUnavailable, c.want)
		s.Stop()
		serving.Wait()
	}
	start(t, "backup", filepath.Join(file, "below"), "--backend", startServer(t)).
		expectExit(exitNoCreate, "not a directory")
	left, err := os.ReadDir(filepath.Dir(file))
	if now, failed := os.ReadFile(file); failed != nil || !bytes.Equal(now, old) || err != nil || len(left) != 1 {
		t.Errorf("the file has %q, beside it are %v: %v, %v", now, left, failed, err)
	}
}

// A directory of backups, of which the last two are kept, and what else is there.
func TestBackupsOnASchedule(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	dir := filepath.Join(t.TempDir(), "backups")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fencelock-20260101T000000Z.backup", "another.backup"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files := func() (all []string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			all = append(all, e.Name())
		}
		return all
	}
	p := start(t, "backup", "--dir", dir, "--every", "1s", "--keep", "2", "--backend", url)
	eventually(t, "there are two newer ones, and what is no backup", func() bool {
		all := files()
		return len(all) == 3 && all[0] == "another.backup" && all[1] != "fencelock-20260101T000000Z.backup" &&
			strings.HasSuffix(all[1], "Z.backup") && strings.HasSuffix(all[2], "Z.backup")
	})
	p.terminate()
	p.expectExit(exitOK, "")
	made := objects[backup](t, succeed(t, "backup", "--dir", dir, "--backend", url, "--json"))
	if len(made) != 1 || filepath.Dir(made[0].File) != dir {
		t.Fatalf("printed %+v", made)
	}
	f, err := os.Open(made[0].File)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if info, err := replica.CheckBackup(f); err != nil || info.Cluster != made[0].Cluster {
		t.Errorf("the file: %+v, %v", info, err)
	}
}

func TestBackupUsage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args, want string
		code       int
	}{
		{"backup", "FILE is missing", exitUsage},
		{"backup a b", `"b"`, exitUsage},
		{"backup a --dir b", `"a"`, exitUsage},
		{"backup a --every 1m", "need --dir", exitUsage},
		{"backup --dir b --every 1ms", "want at least 1s", exitUsage},
		{"backup --dir b --keep 0", "want at least 1", exitUsage},
		{"backup a --backend redis://127.0.0.1", "not one of fencelock, fencelocks", exitUsage},
		{"restore", "FILE is missing", exitUsage},
		{"restore a b", `"b"`, exitUsage},
		{"restore a --data-dir=", "--data-dir is empty", exitUsage},
		{"restore a --closed-for -1s", "negative", exitUsage},
		{"restore /nowhere/at-all", "no such file", exitNoInput},
		{"help backup", "", exitOK},
		{"help restore", "", exitOK},
	} {
		t.Run(c.args, func(t *testing.T) { start(t, strings.Fields(c.args)...).expectExit(c.code, c.want) })
	}
	f := &options{FlagSet: pflag.NewFlagSet("restore", pflag.ContinueOnError)}
	o := newRestore(f)
	err := f.Parse([]string{"--closed-for", "0", "f", "--data-dir", "d", "--new-cluster", "--log-store", "bolt"})
	if err == nil {
		err = o.read(f, f.Args())
	}
	want := replica.RestoreOptions{ClosedFor: -1, NewCluster: true, Store: replica.StoreBolt}
	if err != nil || !reflect.DeepEqual(o.RestoreOptions, want) {
		t.Errorf("understood %+v, %v", o, err)
	}
}
