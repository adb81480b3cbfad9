package gateway

import (
	"cmp"
	"net/http"
	"unicode/utf8"
)

// NameOf is the name of the lock in a path.
type NameOf struct {
	Path  string `path:"name" doc:"The name of the lock as one escaped path segment: / is %2F. With ?name= it must be -"`
	Query string `query:"name" doc:"The name of the lock if the path has -, for names that a path cannot contain: . and .. and /"`
}

func (n NameOf) name() string { return cmp.Or(n.Query, n.Path) }

// Terms are the part of an acquire that applies to all of its names.
type Terms struct {
	OwnerID       string `json:"ownerId" minLength:"1" maxLength:"256" example:"worker-1" doc:"The owner of the lock, for people, and the scope of requestId. Every client can read it"`
	TTLMillis     int64  `json:"ttlMillis" minimum:"1" example:"30000" doc:"The lifetime of the hold unless it is renewed, in milliseconds"`
	Wait          bool   `json:"wait,omitempty" doc:"Wait until the lock is granted, 50 s at most; then the answer is 202"`
	WaitMillis    int64  `json:"waitMillis,omitempty" minimum:"0" doc:"Wait at most this long, in milliseconds; then the answer is 409 and the request has left the queue. A wait above 50 s is answered 202 after 50 s: repeat the request with the remaining time"`
	KeepPlace     bool   `json:"keepPlace,omitempty" doc:"Keep the place in the queue for pollWithinMillis after waitMillis or the end of the connection: the answer is 202"`
	RequestID     string `json:"requestId,omitempty" maxLength:"128" example:"b1946ac9-2f6e-4c0d-9f52-6c1c0e3d7a41" doc:"Identifies the request: a repetition with the same id returns the same hold or the same place in the queue. Scoped by ownerId and by the client's identity"`
	MinHoldMillis int64  `json:"minHoldMillis,omitempty" minimum:"0" doc:"Keep the name closed for at least this long, in milliseconds, even if the hold is released earlier"`
}

// Idempotent is the header Idempotency-Key: another place for requestId, for clients and proxies that support it.
type Idempotent struct {
	Key string `header:"Idempotency-Key" maxLength:"128" doc:"An alternative to requestId in the body"`
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
	Kind         string            `json:"kind,omitempty" enum:"exclusive,shared,permits" doc:"The kind of the hold. Default: exclusive"`
	Permits      int               `json:"permits,omitempty" minimum:"0" doc:"With kind permits: the number of permits to acquire"`
	Limit        int               `json:"limit,omitempty" minimum:"0" doc:"With kind permits: the number of permits of the name; the same for all clients of the name"`
	Hierarchical bool              `json:"hierarchical,omitempty" doc:"The name is a path with steps that end with /, and the hold covers every name below it"`
	Metadata     map[string]string `json:"metadata,omitempty" doc:"Data of the owner that every client can read; 4 KiB at most"`
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
	} `json:"requests" minItems:"1" maxItems:"64" doc:"The locks to acquire: all of them are granted, or none"`
}

// Lock is a hold as its holder sees it.
type Lock struct {
	LockKey        string `json:"lockKey" doc:"The name of the lock"`
	LockToken      string `json:"lockToken" doc:"Renews and releases the hold. Keep it secret"`
	OwnerID        string `json:"ownerId"`
	ExpiresAt      int64  `json:"expiresAt" doc:"When the hold expires unless it is renewed, by the gateway's wall clock, in milliseconds since 1970: for people"`
	FencingToken   uint64 `json:"fencingToken,omitempty" maximum:"9007199254740991" doc:"Greater than the token of every earlier exclusive hold of the name. Absent for shared holds and permits, and if the backend does not fence"`
	TokenSpace     string `json:"tokenSpace,omitempty" doc:"The cluster that issued fencingToken"`
	TTLMillis      int64  `json:"ttlMillis" doc:"The lifetime of the hold unless it is renewed, in milliseconds; at least the requested lifetime"`
	ValidForMillis int64  `json:"validForMillis" doc:"How long the hold is valid, in milliseconds, from the instant at which the client sent this request, by a monotonic clock"`
}

// Locks are several holds.
type Locks struct {
	Locks []Lock `json:"locks" doc:"The holds in the order of the request"`
}

// Queued is a place in the queue.
type Queued struct {
	State            string `json:"state" enum:"QUEUED"`
	RequestID        string `json:"requestId" doc:"Repeat the request with this requestId"`
	PollWithinMillis int64  `json:"pollWithinMillis" doc:"The request leaves the queue unless it is repeated within this time, in milliseconds"`
}

type renewBody struct {
	LockToken string `json:"lockToken" minLength:"1"`
	OwnerID   string `json:"ownerId,omitempty"`
	TTLMillis int64  `json:"ttlMillis,omitempty" minimum:"0" doc:"The new lifetime, in milliseconds. Default: as before. A value below the remaining lifetime has no effect"`
}

// Renewed is the answer to a renewal.
type Renewed struct {
	LockKey        string `json:"lockKey"`
	ExpiresAt      int64  `json:"expiresAt" doc:"In milliseconds since 1970"`
	ValidForMillis int64  `json:"validForMillis" doc:"From the instant at which the client sent this request, in milliseconds"`
}

type releaseBody struct {
	LockToken string `json:"lockToken" minLength:"1"`
	OwnerID   string `json:"ownerId,omitempty"`
}

// Released is the answer to a release.
type Released struct {
	Status          string `json:"status" enum:"RELEASED"`
	LockKey         string `json:"lockKey"`
	AlreadyReleased bool   `json:"alreadyReleased,omitempty" doc:"An earlier request with the same lock token released the hold"`
}

type forceBody struct {
	Reason       string `json:"reason" minLength:"1" maxLength:"1024" doc:"The reason, for the holder and for later readers"`
	FencingToken uint64 `json:"fencingToken,omitempty" doc:"Release only a hold with this fencing token"`
}

// Forced is the answer to a force-release.
type Forced struct {
	Status string `json:"status" enum:"FORCE_RELEASED"`
}

// State is the public state of a lock.
type State struct {
	Locked       bool     `json:"locked"`
	LockKey      string   `json:"lockKey,omitempty"`
	OwnerID      string   `json:"ownerId,omitempty" doc:"The owner of the first holder"`
	FencingToken uint64   `json:"fencingToken,omitempty" doc:"The fencing token of the first holder, if the hold is exclusive"`
	ExpiresAt    int64    `json:"expiresAt,omitempty" doc:"When the first hold expires unless it is renewed, in milliseconds since 1970: for people"`
	Since        int64    `json:"since,omitempty" doc:"When the first holder acquired the lock, by the backend's clock, in milliseconds since 1970: for people"`
	Waiters      int      `json:"waiters,omitempty"`
	Queue        []Waiter `json:"queue,omitempty" doc:"The first hundred waiters in order, if the backend reports them; absent in lists"`
	Remaining    *int     `json:"remainingPermits,omitempty" doc:"The number of free permits, if the backend reports the limit"`
	Limit        int      `json:"limit,omitempty" doc:"The number of permits of the name, if the backend reports it"`
	Revision     uint64   `json:"revision,omitempty" doc:"The revision of the last change, if the backend reports it: a watch with this value as since continues after it"`
	Holders      []Holder `json:"holders,omitempty"`
}

// Holder is one holder of a lock.
type Holder struct {
	OwnerID         string            `json:"ownerId"`
	HoldID          string            `json:"holdId,omitempty" doc:"Identifies the hold; it grants no rights"`
	Nonce           string            `json:"nonce,omitempty" doc:"Distinguishes the hold from every other hold while it exists"`
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
	HoldID  string `json:"holdId,omitempty" doc:"Identifies the hold that the waiter will get"`
	Kind    string `json:"kind"`
	Permits int    `json:"permits,omitempty"`
	Since   int64  `json:"since,omitempty" doc:"When the wait began, in milliseconds since 1970, if the backend reports it"`
}

// List is one page of the locks that are held.
type List struct {
	Locks     []State `json:"locks" doc:"Sorted by name"`
	NextAfter string  `json:"nextAfter,omitempty" doc:"There are more names: repeat the request with this value as after"`
}

// Cancelled is the answer to leaving a queue.
type Cancelled struct {
	Status string `json:"status" enum:"CANCELLED"`
}

func (o *Item) wish(name string) wish {
	return wish{name, cmp.Or(o.Kind, "exclusive"), o.Permits, o.Limit, o.Hierarchical, o.Metadata}
}
