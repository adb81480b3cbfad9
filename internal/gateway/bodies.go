package gateway

import (
	"cmp"
	"net/http"
	"unicode/utf8"
)

// NameOf is the name of the lock in a path.
type NameOf struct {
	Path  string `path:"name" doc:"The name of the lock, one escaped segment: / is %2F. With ?name= it must be -"`
	Query string `query:"name" doc:"The name of the lock where the path has -, for those that no path can have: . and .. and /"`
}

func (n NameOf) name() string { return cmp.Or(n.Query, n.Path) }

// Terms are the part of an acquire that applies to all of its names.
type Terms struct {
	OwnerID       string `json:"ownerId" minLength:"1" maxLength:"256" example:"worker-1" doc:"Who holds the lock, for people, and the scope of requestId. It is shown to everybody"`
	TTLMillis     int64  `json:"ttlMillis" minimum:"1" example:"30000" doc:"How long the hold lives unless it is renewed"`
	Wait          bool   `json:"wait,omitempty" doc:"Wait until the lock is granted, 50 s at most; then 202"`
	WaitMillis    int64  `json:"waitMillis,omitempty" minimum:"0" doc:"Wait at most that long; then 409, and nothing is left of the request. Above 50 s it is 202 after these: come again with the rest"`
	KeepPlace     bool   `json:"keepPlace,omitempty" doc:"When waitMillis is over, and when the connection ends, the place in the queue is kept for pollWithinMillis: 202"`
	RequestID     string `json:"requestId,omitempty" maxLength:"128" example:"b1946ac9-2f6e-4c0d-9f52-6c1c0e3d7a41" doc:"Makes a repeat of the request the same request: the same hold, or the same place. Scoped by ownerId and by the client's certificate"`
	MinHoldMillis int64  `json:"minHoldMillis,omitempty" minimum:"0" doc:"Keep the name closed for at least that long, also if it is released earlier"`
}

// Idempotent is the header Idempotency-Key: another place for requestId, for clients and proxies that support it.
type Idempotent struct {
	Key string `header:"Idempotency-Key" maxLength:"128" doc:"The same as requestId in the body, which may be missing then"`
}

// maxKey bounds the header Idempotency-Key, in characters. It agrees with the tag of Idempotent.
const maxKey = 128

// idempotent uses the header Idempotency-Key, if there is one, as the request's id.
func idempotent(r *http.Request, t *Terms) error {
	key := r.Header.Get("Idempotency-Key")
	switch {
	case key == "":
		return nil
	case utf8.RuneCountInString(key) > maxKey:
		return problem(codeRequest, "the header Idempotency-Key has more than 128 characters")
	case t.RequestID != "" && t.RequestID != key:
		return problem(codeRequest, "requestId and the header Idempotency-Key have different values")
	}
	t.RequestID = key
	return nil
}

// Item is the request for one name in an acquire.
type Item struct {
	Kind         string            `json:"kind,omitempty" enum:"exclusive,shared,permits" doc:"Default exclusive"`
	Permits      int               `json:"permits,omitempty" minimum:"0" doc:"With kind permits: how many"`
	Limit        int               `json:"limit,omitempty" minimum:"0" doc:"With kind permits: of how many; all who use the name say the same"`
	Hierarchical bool              `json:"hierarchical,omitempty" doc:"The name is a path whose steps end with /, and the hold counts for all below it"`
	Metadata     map[string]string `json:"metadata,omitempty" doc:"Shown to those who look; 4 KiB at most"`
}

type acquireBody struct {
	Terms
	Item
}

type acquireAllBody struct {
	Terms
	Requests []struct {
		LockKey string `json:"lockKey" minLength:"1" doc:"The name of the lock"`
		Item
	} `json:"requests" minItems:"1" maxItems:"64" doc:"All of them are granted, or none"`
}

// Lock is a hold as its holder sees it.
type Lock struct {
	LockKey        string `json:"lockKey" doc:"The name of the lock"`
	LockToken      string `json:"lockToken" doc:"Renews and releases the hold: a secret"`
	OwnerID        string `json:"ownerId"`
	ExpiresAt      int64  `json:"expiresAt" doc:"When the hold ends unless it is renewed, by the gateway's wall clock, in milliseconds since 1970: for people"`
	FencingToken   uint64 `json:"fencingToken,omitempty" maximum:"9007199254740991" doc:"Greater than that of every earlier exclusive hold of the name. Missing if the backend does not fence, and for shared holds and permits"`
	TokenSpace     string `json:"tokenSpace,omitempty" doc:"The cluster that issued fencingToken"`
	TTLMillis      int64  `json:"ttlMillis" doc:"How long the hold lives unless it is renewed; not less than was asked for"`
	ValidForMillis int64  `json:"validForMillis" doc:"For how long the hold may be relied on, from the instant at which the client sent this request, by a clock that is never set"`
}

// Locks are several holds.
type Locks struct {
	Locks []Lock `json:"locks" doc:"In the order of the request"`
}

// Queued is a place in the queue.
type Queued struct {
	State            string `json:"state" enum:"QUEUED"`
	RequestID        string `json:"requestId" doc:"Send the same request with it again"`
	PollWithinMillis int64  `json:"pollWithinMillis" doc:"The place is lost if the request does not come again within that time"`
}

type renewBody struct {
	LockToken string `json:"lockToken" minLength:"1"`
	OwnerID   string `json:"ownerId,omitempty"`
	TTLMillis int64  `json:"ttlMillis,omitempty" minimum:"0" doc:"Default as before. Less than what is left changes nothing"`
}

// Renewed is the answer to a renewal.
type Renewed struct {
	LockKey        string `json:"lockKey"`
	ExpiresAt      int64  `json:"expiresAt" doc:"In milliseconds since 1970"`
	ValidForMillis int64  `json:"validForMillis" doc:"From the instant at which the client sent this request"`
}

type releaseBody struct {
	LockToken string `json:"lockToken" minLength:"1"`
	OwnerID   string `json:"ownerId,omitempty"`
}

// Released is the answer to a release.
type Released struct {
	Status          string `json:"status" enum:"RELEASED"`
	LockKey         string `json:"lockKey"`
	AlreadyReleased bool   `json:"alreadyReleased,omitempty" doc:"It was released before, by the same lock token"`
}

type forceBody struct {
	Reason       string `json:"reason" minLength:"1" maxLength:"1024" doc:"Why, for the holder and for those who look later"`
	FencingToken uint64 `json:"fencingToken,omitempty" doc:"Only if the holder has this token"`
}

// Forced is the answer to a force-release.
type Forced struct {
	Status string `json:"status" enum:"FORCE_RELEASED"`
}

// State is the public state of a lock.
type State struct {
	Locked       bool     `json:"locked"`
	LockKey      string   `json:"lockKey,omitempty"`
	OwnerID      string   `json:"ownerId,omitempty" doc:"The first holder's"`
	FencingToken uint64   `json:"fencingToken,omitempty" doc:"The first holder's, if it is exclusive"`
	ExpiresAt    int64    `json:"expiresAt,omitempty" doc:"When the first hold ends unless it is renewed, in milliseconds since 1970: for people"`
	Since        int64    `json:"since,omitempty" doc:"When the first holder got it, by the backend's clock, in milliseconds since 1970: for people"`
	Waiters      int      `json:"waiters,omitempty"`
	Queue        []Waiter `json:"queue,omitempty" doc:"The first hundred who wait, in their order, where the backend tells it; not in a list"`
	Remaining    *int     `json:"remainingPermits,omitempty" doc:"How many permits are free, where the backend tells the limit"`
	Limit        int      `json:"limit,omitempty" doc:"Of how many permits, where the backend tells it"`
	Revision     uint64   `json:"revision,omitempty" doc:"Of its last change, where the backend tells one; a watch since it goes on behind it"`
	Holders      []Holder `json:"holders,omitempty"`
}

// Holder is one holder of a lock.
type Holder struct {
	OwnerID         string            `json:"ownerId"`
	HoldID          string            `json:"holdId,omitempty" doc:"Names the hold, and moves nothing"`
	Nonce           string            `json:"nonce,omitempty" doc:"Tells the hold from every other one, for its life"`
	Kind            string            `json:"kind"`
	Permits         int               `json:"permits,omitempty"`
	FencingToken    uint64            `json:"fencingToken,omitempty"`
	Since           int64             `json:"since,omitempty" doc:"In milliseconds since 1970"`
	ExpiresInMillis int64             `json:"expiresInMillis,omitempty"`
	Metadata        map[string]string `json:"metadata,omitempty"`
}

// Waiter is one waiter of a lock.
type Waiter struct {
	OwnerID string `json:"ownerId"`
	HoldID  string `json:"holdId,omitempty" doc:"Names the hold that it will have"`
	Kind    string `json:"kind"`
	Permits int    `json:"permits,omitempty"`
	Since   int64  `json:"since,omitempty" doc:"When the wait began, in milliseconds since 1970, where the backend tells it"`
}

// List is one page of the locks that are held.
type List struct {
	Locks     []State `json:"locks" doc:"Sorted by name"`
	NextAfter string  `json:"nextAfter,omitempty" doc:"There is more: ask again with it as after"`
}

// Cancelled is the answer to leaving a queue.
type Cancelled struct {
	Status string `json:"status" enum:"CANCELLED"`
}

func (o *Item) wish(name string) wish {
	return wish{name, cmp.Or(o.Kind, "exclusive"), o.Permits, o.Limit, o.Hierarchical, o.Metadata}
}
