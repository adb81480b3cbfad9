package replica

import (
	"io"
	"strings"

	"github.com/hashicorp/raft"
)

// addressed is a transport that names the member it wants. Raft dials a member's address and trusts whoever answers.
// A member that lost its data and restarted would pass for its former self: its vote would count, although it has
// forgotten its earlier votes and acknowledgements, and an entry that most members have could be outvoted by members
// that lack it. So every connection names its member, see readPreface, and others refuse it.
type addressed struct{ transport }

// atSign separates a member from its address where raft knows addresses only.
const atSign = "@"

func at(id raft.ServerID, address raft.ServerAddress) raft.ServerAddress {
	return raft.ServerAddress(id) + raft.ServerAddress(atSign) + address
}

// splitAt undoes at.
func splitAt(address raft.ServerAddress) (id raft.ServerID, rest string) {
	name, rest, _ := strings.Cut(string(address), atSign)
	return raft.ServerID(name), rest
}

func (t addressed) AppendEntries(
	id raft.ServerID, to raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	return t.transport.AppendEntries(id, at(id, to), req, resp)
}

func (t addressed) RequestVote(
	id raft.ServerID, to raft.ServerAddress, req *raft.RequestVoteRequest, resp *raft.RequestVoteResponse,
) error {
	return t.transport.RequestVote(id, at(id, to), req, resp)
}

func (t addressed) RequestPreVote(
	id raft.ServerID, to raft.ServerAddress, req *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse,
) error {
	return t.transport.RequestPreVote(id, at(id, to), req, resp)
}

func (t addressed) InstallSnapshot(
	id raft.ServerID, to raft.ServerAddress, req *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse,
	r io.Reader,
) error {
	return t.transport.InstallSnapshot(id, at(id, to), req, resp, r)
}

func (t addressed) TimeoutNow(
	id raft.ServerID, to raft.ServerAddress, req *raft.TimeoutNowRequest, resp *raft.TimeoutNowResponse,
) error {
	return t.transport.TimeoutNow(id, at(id, to), req, resp)
}
