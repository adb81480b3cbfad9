package replica

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"time"
)

// A backup consists of a line with the format, a line of JSON, the snapshot of the state machine, and the SHA-256 of
// all of these.
const backupMagic = "fencelock backup 1\n"

// BackupInfo describes a backup. It is the line of JSON in a backup.
type BackupInfo struct {
	// Cluster is the token space.
	Cluster string `json:"cluster"`
	// Revision is at least the revision of the last token.
	Revision uint64 `json:"revision"`
	// History is the generation of the cluster, as generation.Of reads it; empty in backups of older versions.
	History string `json:"history,omitempty"`
	// permitted has the TTLs that the cluster permitted. MaxTTL is zero in backups of older versions.
	permitted
	// At is the time of the backup, by the clock of the server that made it. Server is the version of that server.
	At     time.Time `json:"at"`
	Server string    `json:"server,omitempty"`
}

// ErrNoBackup is in the chain of errors about a file that is not a backup, or is truncated or damaged.
var ErrNoBackup = errors.New("it is not a backup, or is truncated or damaged")

// CheckBackup reads a whole backup into memory and checks it. The error wraps ErrNoBackup, or is an error of r.
func CheckBackup(r io.Reader) (BackupInfo, error) {
	info, _, err := readBackup(r)
	return info, err
}

// WriteBackup writes the state as a backup. The caller sets At and Server of info, which the state does not have.
func (s *Frozen) WriteBackup(w io.Writer, info BackupInfo) error {
	info.Cluster, info.History, info.Revision = s.facts.Cluster, s.facts.Restored, s.machine.Revision()
	info.MaxTTL, info.DefaultMaxTTL = s.facts.max(), s.facts.DefaultMaxTTL
	line, err := json.Marshal(info)
	if err != nil {
		return err
	}
	sum := sha256.New()
	both := io.MultiWriter(w, sum)
	_, err = both.Write(append([]byte(backupMagic), append(line, '\n')...))
	if err == nil {
		_, err = s.machine.WriteTo(both)
	}
	if err == nil {
		_, err = w.Write(sum.Sum(nil))
	}
	return err
}

// readBackup reads and checks a whole backup, and returns its description and its snapshot.
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
