package httpguard

import (
	"bytes"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/refusal"
)

// TypeBase is the prefix of the types of problem documents; the reason follows: stale-token, no-token, not-exclusive,
// another-space, another-hold, repeated-write, reordered-write or invalid-claim.
const TypeBase = "https://github.com/fencelock/fencelock/blob/main/docs/FENCING.md#"

const contentType = "application/problem+json"

// problem is a document of RFC 9457. Tokens are strings: a number of JSON is often read as a float.
type problem struct {
	Type     string        `json:"type"`
	Title    string        `json:"title"`
	Status   int           `json:"status"`
	Detail   string        `json:"detail,omitempty"`
	Resource string        `json:"resource,omitempty"`
	Token    fencing.Token `json:"token,omitzero"`
	Highest  fencing.Token `json:"highest,omitzero"`
	Space    string        `json:"space,omitempty"`
	Want     string        `json:"want,omitempty"`
	Sequence uint64        `json:"sequence,omitzero,string"`
	Last     uint64        `json:"last,omitzero,string"`
	Mixed    []string      `json:"mixed,omitempty"`

	Generation        string `json:"generation,omitempty"`
	HighestGeneration string `json:"highestGeneration,omitempty"`
	Nonce             string `json:"nonce,omitempty"`
	WantNonce         string `json:"wantNonce,omitempty"`
}

// Refuse answers with 409 and a problem document if err is a guard's refusal, and reports whether it was. For any
// other error, and nil, it has no effect.
func Refuse(w http.ResponseWriter, err error) bool {
	r, ok := refusal.Of(err)
	if !ok {
		return false
	}
	p := problem{
		Type: TypeBase + string(r.Kind), Title: r.Title, Status: http.StatusConflict, Detail: r.Err().Error(),
		Resource: r.Resource, Token: r.Token, Highest: r.Highest, Space: r.Space, Want: r.Want,
		Sequence: r.Sequence, Last: r.Last, Mixed: r.Mixed, Nonce: r.Nonce.String(), WantNonce: r.WantNonce.String(),
	}
	if r.Generation != r.HighestGeneration {
		p.Generation, p.HighestGeneration = r.Generation.String(), r.HighestGeneration.String()
	}
	answer(w, p)
	return true
}

func badRequest(w http.ResponseWriter, err error) {
	answer(w, problem{
		Type: TypeBase + "invalid-claim", Title: "Invalid fencing claim", Status: http.StatusBadRequest,
		Detail: err.Error(),
	})
}

func unavailable(w http.ResponseWriter) {
	answer(w, problem{Type: "about:blank", Title: "Service Unavailable", Status: http.StatusServiceUnavailable})
}

func answer(w http.ResponseWriter, p problem) {
	text, err := json.Marshal(p)
	if err != nil { // a struct of strings
		http.Error(w, p.Title, p.Status)
		return
	}
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	w.Write(text) //nolint:errcheck // the client has disconnected
}

// most bounds the bytes read of a problem document.
const most = 64 << 10

// ErrorFrom returns the refusal that the service has answered with, as the error that its guard returned, or nil for
// any other answer. It reads the body of an answer that may be one, and leaves it readable; closing it stays with the
// caller.
func ErrorFrom(resp *http.Response) error {
	media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if resp.StatusCode != http.StatusConflict || err != nil || media != contentType {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, most))
	resp.Body = unread{io.MultiReader(bytes.NewReader(text), resp.Body), resp.Body}
	var p problem
	if err != nil || json.Unmarshal(text, &p) != nil {
		return nil
	}
	kind, ours := strings.CutPrefix(p.Type, TypeBase)
	if !ours {
		return nil
	}
	r := refusal.Refusal{
		Kind: refusal.Kind(kind), Resource: p.Resource, Token: p.Token, Highest: p.Highest, Space: p.Space,
		Want: p.Want, Sequence: p.Sequence, Last: p.Last, Mixed: p.Mixed,
	}
	r.ReadHold(p.Generation, p.HighestGeneration, p.Nonce, p.WantNonce)
	return r.Err()
}

// unread is a body that restarts from its beginning.
type unread struct {
	io.Reader
	io.Closer
}
