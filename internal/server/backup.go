package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// A backup is a line that says what it is, a line of JSON, the snapshot of the state machine, and the SHA-256 of all
// that.
const backupMagic = "fencelock backup 1\n"

// BackupInfo says what a backup is of. It is the line of JSON.
type BackupInfo struct {
	// Cluster is its token space.
	Cluster string `json:"cluster"`
	// Revision is that of the last token, or later.
	Revision uint64 `json:"revision"`
	// MaxTTL is the longest TTL that the server granted; zero in backups of older versions.
	MaxTTL time.Duration `json:"maxTTL,omitempty"`
	// At is when it was made, by the clock of the server that made it, and Server the version of that.
	At     time.Time `json:"at"`
	Server string    `json:"server,omitempty"`
}

// ErrNoBackup is in the chain of errors about a file that is no backup, or is cut off or damaged.
var ErrNoBackup = errors.New("it is no backup, or is cut off or damaged")

// CheckBackup reads a backup to its end, and all of it into memory. The error wraps ErrNoBackup or is that of r.
func CheckBackup(r io.Reader) (BackupInfo, error) {
	info, _, err := readBackup(r)
	return info, err
}

// Backup writes everything that the cluster keeps to w, with all that was acknowledged to anybody before the call. Any
// member does that, while there is a leader. If it returns an error, what was written is of no use, and Restore refuses it. The locks go on
// meanwhile.
func (s *Server) Backup(ctx context.Context, w io.Writer) error {
	frozen, err := s.present(ctx)
	if err != nil {
		return fmt.Errorf("server.Backup: %w", err)
	}
	line, err := json.Marshal(BackupInfo{
		Cluster: frozen.facts.Cluster, Revision: frozen.machine.Revision(), MaxTTL: s.config.MaxTTL, At: s.config.now().UTC(), Server: s.config.Version,
	})
	if err != nil {
		return err
	}
	sum := sha256.New()
	both := io.MultiWriter(w, sum)
	_, err = both.Write(append([]byte(backupMagic), append(line, '\n')...))
	if err == nil {
		_, err = frozen.machine.WriteTo(both)
	}
	if err == nil {
		_, err = w.Write(sum.Sum(nil))
	}
	if err != nil {
		return fmt.Errorf("server.Backup: %w", err)
	}
	return nil
}

// present is the state with all that was acknowledged before the call. A member that follows asks the leader how far
// that goes, and waits until it has come there.
func (s *Server) present(ctx context.Context) (*frozen, error) {
	index, err := s.acknowledged(ctx)
	if err != nil {
		return nil, err
	}
	for {
		news := s.news.wait()
		if s.applied() >= index {
			return s.node.fsm.freeze()
		}
		select {
		case <-news:
		case <-s.done:
			return nil, errClosing
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// acknowledged is how far the log goes of what was acknowledged to anybody before the call.
func (s *Server) acknowledged(ctx context.Context) (uint64, error) {
	if r := s.leadership.Load(); r != nil {
		return r.acknowledged(ctx)
	}
	address, id := s.node.raft.LeaderWithID()
	if s.peers == nil || address == "" || id == s.node.id {
		return 0, errNotLeader
	}
	a, err := s.peers.ask(ctx, string(address), question{Index: true})
	switch {
	case err != nil:
		return 0, fmt.Errorf("the leader at %s: %w", address, err)
	case a.Index == 0:
		return 0, errNotLeader
	}
	return a.Index, nil
}

func (r *leadership) acknowledged(ctx context.Context) (uint64, error) {
	index := r.server.node.raft.CommitIndex()
	proven := make(chan error, 1)
	r.confirmer.ask(func(err error) { proven <- err })
	select {
	case err := <-proven:
		return index, err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// applied is how far this member has carried the log out. Raft's own number runs ahead of the state machine; before the
// first entry, the state is that of a snapshot.
func (s *Server) applied() uint64 {
	applied := s.node.raft.AppliedIndex()
	if index := s.node.fsm.index.Load(); index > 0 {
		return min(applied, index)
	}
	return applied
}

// Backup implements lockpb.AdminServiceServer.
func (a *admin) Backup(_ *lockpb.BackupRequest, stream grpc.ServerStreamingServer[lockpb.BackupPiece]) error {
	err := a.server.Backup(stream.Context(), pieces{stream})
	if errors.Is(err, errNotLeader) {
		return a.server.notLeading()
	}
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// pieceBytes bounds one piece of a backup.
const pieceBytes = 256 << 10

// pieces writes to a stream.
type pieces struct {
	stream grpc.ServerStreamingServer[lockpb.BackupPiece]
}

func (p pieces) Write(data []byte) (int, error) {
	written := 0
	for len(data) > 0 {
		n := min(len(data), pieceBytes)
		if err := p.stream.Send(&lockpb.BackupPiece{Data: data[:n]}); err != nil {
			return written, err
		}
		written, data = written+n, data[n:]
	}
	return written, nil
}

// readBackup returns the parts of a backup, which it reads to its end.
func readBackup(from io.Reader) (BackupInfo, []byte, error) {
	all, err := io.ReadAll(from)
	if err != nil {
		return BackupInfo{}, nil, err
	}
	if len(all) < sha256.Size || !bytes.HasPrefix(all, []byte(backupMagic)) {
		return BackupInfo{}, nil, ErrNoBackup
	}
	body, sum := all[:len(all)-sha256.Size], all[len(all)-sha256.Size:]
	if want := sha256.Sum256(body); !bytes.Equal(sum, want[:]) {
		return BackupInfo{}, nil, ErrNoBackup
	}
	line, snapshot, ok := bytes.Cut(body[len(backupMagic):], []byte("\n"))
	var info BackupInfo
	if err := json.Unmarshal(line, &info); err != nil || !ok || info.Cluster == "" {
		return BackupInfo{}, nil, ErrNoBackup
	}
	return info, snapshot, nil
}
