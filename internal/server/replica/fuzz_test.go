package replica

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"net"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

// bytesConn is a connection with received bytes.
type bytesConn struct {
	net.Conn
	r *bytes.Reader
}

func (c bytesConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// The port for members admits a connection only with the preface of a member.
func FuzzPreface(f *testing.F) {
	const home = "cluster/restored"
	for _, kind := range []byte{forRaft, forProcess, forQuestions, 'x'} {
		for _, other := range []string{"", home, "another"} {
			f.Add(preface(kind, other, "self"), true)
			f.Add(preface(kind, other, "self@other@3-ab@2-cd@7"), true)
			f.Add(preface(kind, other, ""), false)
		}
	}
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), false)
	f.Fuzz(func(t *testing.T, data []byte, in bool) {
		ours := ""
		if in {
			ours = home
		}
		p := &peerNet{home: func() string { return ours }}
		p.now.Store(&speaker{self: &Replica{id: "self"}})
		r := bytes.NewReader(data)
		kind, who, err := p.readPreface(bytesConn{r: r})
		if err != nil {
			return
		}
		read := data[:len(data)-r.Len()]
		parts := read[len(prefaceMagic)+3:]
		theirs, member := parts[:read[len(prefaceMagic)+1]], parts[read[len(prefaceMagic)+1]:]
		switch {
		case !bytes.Equal(read, preface(kind, string(theirs), string(member))),
			kind != forRaft && kind != forProcess && kind != forQuestions:
			t.Errorf("%q is let in as %q", data, kind)
		case ours != "" && len(theirs) > 0 && string(theirs) != ours:
			t.Errorf("%q of another cluster is let in", data)
		case kind == forProcess && who.String() != string(member):
			t.Errorf("%q is read as %v", data, who)
		case kind != forQuestions && who.to != "self":
			t.Errorf("%q, for another member, is let in", data)
		case kind != forQuestions && in && len(theirs) == 0:
			t.Errorf("%q, of before the restore, is let in", data)
		}
	})
}

// A damaged backup is an error. A backup with a correct checksum but meaningless content either is an error or
// restores; it never panics.
func FuzzBackup(f *testing.F) {
	m := NewFSM(newMachine(), func() {}, func(err error) { f.Error(err) })
	m.facts.Cluster = "c"
	session := machine.SessionID{1}
	for i, c := range []machine.Command{
		{Op: machine.OpOpenSession, Session: session, TTL: time.Minute}, acquire(session, "x"),
	} {
		index := uint64(i + 1)
		m.Apply(&raft.Log{Index: index, Term: 1, Data: EncodeBatch(1, &machine.Batch{Commands: []machine.Command{c}})})
	}
	frozen, err := m.Freeze()
	if err != nil {
		f.Fatal(err)
	}
	var whole bytes.Buffer
	if err := frozen.WriteBackup(&whole, BackupInfo{}); err != nil {
		f.Fatal(err)
	}
	body := whole.Bytes()[:whole.Len()-sha256.Size]
	f.Add(body, uint32(0), byte(1))
	f.Add([]byte(backupMagic+"{}\n"), uint32(3), byte(0))
	f.Add([]byte(backupMagic+"{\"cluster\": \"c\", \"maxTTL\": -1}\nFLS"), uint32(3), byte(0))
	f.Fuzz(func(t *testing.T, body []byte, at uint32, flip byte) {
		sum := sha256.Sum256(body)
		all := append(bytes.Clone(body), sum[:]...)
		info, snapshot, err := readBackup(bytes.NewReader(all))
		if err == nil {
			line, _, _ := bytes.Cut(body[len(backupMagic):], []byte("\n"))
			var want BackupInfo
			if json.Unmarshal(line, &want) != nil || want != info || info.Cluster == "" {
				t.Errorf("the header %q is read as %+v", line, info)
			}
			_, _ = machine.New(1).RestoreBackup(bytes.NewReader(snapshot), 0) // it must not panic
		}
		if flip == 0 {
			return
		}
		all[int(at)%len(all)] ^= flip
		if _, _, err := readBackup(bytes.NewReader(all)); err == nil {
			t.Errorf("with byte %d changed by %#x it is a backup still", int(at)%len(all), flip)
		}
	})
}
