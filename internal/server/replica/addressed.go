package replica

import (
	"io"
	"strings"

	"github.com/hashicorp/raft"
)

// addressed is a transport that names the member to reach. Raft dials the address of a member and trusts the server
// that answers. Without names, a member that lost its data and restarted could act as its former self: its vote would
// count, although it has forgotten its earlier votes and acknowledgements, and members that lack an entry could outvote
// the members that have it. So every connection names its member, and any other member refuses it: see readPreface.
type addressed struct{ transport }

// atSign separates a member from its address, since raft passes addresses only.
const atSign = "@"

func at(id raft.ServerID, address raft.ServerAddress) raft.ServerAddress {
	return raft.ServerAddress(id) + raft.ServerAddress(atSign) + address
}

// splitAt is the inverse of at.
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
