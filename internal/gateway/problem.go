package gateway

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/fencelock/fencelock/backend"
)

// Problem is the answer to every failed call: a problem document of RFC 9457. Its first members are for programs.
type Problem struct {
	Code             string         `json:"error" doc:"The type of the error, for programs" example:"LOCK_ALREADY_HELD"`
	CurrentOwner     string         `json:"currentOwner,omitempty" doc:"The owner of the lock, if the backend reports it"`
	RetryAfterMillis int64          `json:"retryAfterMillis,omitempty" doc:"When the hold expires unless it is renewed, or when to retry, in milliseconds"`
	LockKey          string         `json:"lockKey,omitempty" doc:"The name of the lock that caused the error, in a request for several locks"`
	Reason           string         `json:"reason,omitempty" doc:"Why a hold ended: expired, session-expired, force-released, max-hold, …"`
	Quota            string         `json:"quota,omitempty" doc:"The exhausted quota: of the gateway, such as client-waits, or of the backend, such as client-sessions"`
	SameOwner        bool           `json:"sameOwner,omitempty" doc:"The requesting owner already holds the lock"`
	SameRequest      bool           `json:"sameRequest,omitempty" doc:"The holder acquired the lock with the same requestId through another replica"`
	Lock             *Lock          `json:"lock,omitempty" doc:"The grant that the request received instead of leaving the queue"`
	Cycle            []DeadlockEdge `json:"cycle,omitempty" doc:"Each owner waits for a name that the next owner holds"`
	Type             string         `json:"type" doc:"A URI that identifies the type of the error"`
	Title            string         `json:"title" doc:"The title of the error type"`
	Status           int            `json:"status" doc:"The status code"`
	Detail           string         `json:"detail,omitempty" doc:"A description of this error, for people"`

	headers http.Header
	own     bool // it contains only data that the sender of the request already has
	// byService reports that the lock service, not the gateway, denied the request.
	byService bool
}

// DeadlockEdge is one edge of a cycle.
type DeadlockEdge struct {
	Owner string `json:"owner" doc:"The owner"`
	Holds string `json:"holds" doc:"The name that the owner holds"`
	Wants string `json:"wants" doc:"The name that the owner waits for"`
}

// Error implements error.
func (p *Problem) Error() string { return p.Code + ": " + p.Detail }

// GetStatus implements huma.StatusError.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType implements huma.ContentTypeFilter.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

// GetHeaders implements huma.HeadersError.
func (p *Problem) GetHeaders() http.Header { return p.headers }

// The codes of problems.
const (
	codeHeld      = "LOCK_ALREADY_HELD"
	codeNotOwner  = "NOT_LOCK_OWNER"
	codeExpired   = "LOCK_EXPIRED"
	codeNotLocked = "NOT_LOCKED"
	codeDone      = "REQUEST_DONE"
	codeMismatch  = "REQUEST_MISMATCH"
	codeCancelled = "CANCELLED"
	codeDeadlock  = "DEADLOCK"
	codeQueueFull = "QUEUE_FULL"
	codeLimit     = "LIMIT_MISMATCH"
	codeChanged   = "HOLDER_CHANGED"
	codeCompacted = "COMPACTED"
	codeDenied    = "DENIED"

	codeUnauthenticated = "UNAUTHENTICATED"

	codeMisdirected  = "MISDIRECTED"
	codeName         = "INVALID_NAME"
	codeTTL          = "INVALID_TTL"
	codeRequest      = "INVALID_REQUEST"
	codeTooLarge     = "TOO_LARGE"
	codeQuota        = "QUOTA"
	codeUnsupported  = "UNSUPPORTED"
	codeElsewhere    = "HELD_ELSEWHERE"
	codeUnavailable  = "UNAVAILABLE"
	codeMisconfig    = "MISCONFIGURED"
	codeHistory      = "HISTORY_LOST"
	codeUnknown      = "UNKNOWN"
	codeNoWait       = "NO_SUCH_WAIT"
	codeGranted      = "GRANTED"
	codeInternal     = "INTERNAL"
	codeNotFound     = "NOT_FOUND"
	codeMethod       = "METHOD_NOT_ALLOWED"
	codeMedia        = "UNSUPPORTED_MEDIA_TYPE"
	problemTypes     = "urn:fencelock:problem:"
	comeAgain        = time.Second // the retry time of temporary problems
	maxRetrySeconds  = 1 << 31
	contentProblem   = "application/problem+json"
	contentJSON      = "application/json"
	internalSentence = "the gateway failed; see its log"
)

// kinds maps the codes of problems to their status and title.
var kinds = map[string]struct {
	status int
	title  string
}{
	codeHeld:            {http.StatusConflict, "The lock is held"},
	codeNotOwner:        {http.StatusForbidden, "The lock token does not belong to this lock and owner"},
	codeExpired:         {http.StatusConflict, "The hold has ended"},
	codeNotLocked:       {http.StatusNotFound, "The lock is not held"},
	codeDone:            {http.StatusConflict, "The request was already executed, and its hold has ended"},
	codeMismatch:        {http.StatusUnprocessableEntity, "The requestId was used for another request"},
	codeCancelled:       {http.StatusConflict, "The wait was cancelled"},
	codeDeadlock:        {http.StatusConflict, "Waiting would deadlock"},
	codeQueueFull:       {http.StatusTooManyRequests, "The lock's queue is full"},
	codeLimit:           {http.StatusConflict, "The name is in use with another kind or limit"},
	codeChanged:         {http.StatusPreconditionFailed, "The condition is not met"},
	codeCompacted:       {http.StatusGone, "The changes since then are no longer stored"},
	codeUnauthenticated: {http.StatusUnauthorized, "The credential is invalid"},
	codeDenied:          {http.StatusForbidden, "Not permitted"},
	codeMisdirected:     {http.StatusMisdirectedRequest, "The gateway does not serve the host of the request"},
	codeName:            {http.StatusBadRequest, "The name of the lock is invalid"},
	codeTTL:             {http.StatusBadRequest, "The TTL is invalid"},
	codeRequest:         {http.StatusBadRequest, "The request is invalid"},
	codeTooLarge:        {http.StatusRequestEntityTooLarge, "The body is too large"},
	codeQuota:           {http.StatusTooManyRequests, "A quota is exhausted"},
	codeUnsupported:     {http.StatusNotImplemented, "The backend does not support the request"},
	codeElsewhere:       {http.StatusServiceUnavailable, "Another replica has the hold"},
	codeUnavailable:     {http.StatusServiceUnavailable, "The lock service is unavailable"},
	codeMisconfig:       {http.StatusServiceUnavailable, "The lock service is misconfigured"},
	codeHistory:         {http.StatusServiceUnavailable, "The lock service has lost its history"},
	codeUnknown:         {http.StatusGatewayTimeout, "The outcome is unknown"},
	codeNoWait:          {http.StatusNotFound, "There is no such wait"},
	codeGranted:         {http.StatusConflict, "The request has been granted"},
	codeInternal:        {http.StatusInternalServerError, "The gateway failed"},
	codeMethod:          {http.StatusMethodNotAllowed, "The path does not support this method"},
	codeMedia:           {http.StatusUnsupportedMediaType, "The body is not application/json"},
	codeNotFound:        {http.StatusNotFound, "There is no such path"},
}

func problem(code, detail string) *Problem {
	k := kinds[code]
	return &Problem{Code: code, Type: problemTypes + code, Title: k.title, Status: k.status, Detail: detail}
}

// quota returns the problem for an exhausted quota, of one client or of all clients.
func quota(name, detail string) *Problem {
	p := problem(codeQuota, detail).retry(comeAgain)
	p.Quota = name
	return p
}

// retry sets the time until the next try, which the header has in seconds, rounded up.
func (p *Problem) retry(after time.Duration) *Problem {
	if after <= 0 {
		return p
	}
	p.RetryAfterMillis = max(1, after.Milliseconds())
	seconds := min(math.Ceil(after.Seconds()), maxRetrySeconds)
	p.headers = http.Header{"Retry-After": {strconv.Itoa(int(seconds))}}
	return p
}

// problemOf converts an error of a driver to a problem.
func problemOf(err error) *Problem {
	var already *Problem
	if errors.As(err, &already) {
		return already
	}
	var used interface{ Quota() string } // an error of a driver that names a limit of the service
	var held *backend.HeldError
	var notHeld *backend.NotHeldError
	var cycle *backend.DeadlockError
	is := func(target error) bool { return errors.Is(err, target) }
	say := err.Error()
	switch {
	case is(backend.ErrInvalidName):
		return problem(codeName, say)
	case is(backend.ErrInvalidTTL):
		return problem(codeTTL, say)
	case is(backend.ErrInvalidOption):
		return problem(codeRequest, say)
	case is(backend.ErrHistoryLost):
		return problem(codeHistory, say)
	case is(backend.ErrDenied):
		p := problem(codeDenied, say)
		p.byService = true
		return p
	case is(backend.ErrMisconfigured):
		return problem(codeMisconfig, say)
	case errors.As(err, &cycle):
		p := problem(codeDeadlock, say)
		for _, e := range cycle.Cycle {
			p.Cycle = append(p.Cycle, DeadlockEdge(e))
		}
		return p
	case errors.As(err, &used):
		code := codeQuota
		if is(backend.ErrQueueFull) {
			code = codeQueueFull
		}
		p := problem(code, say).retry(comeAgain)
		p.Quota = used.Quota()
		return p
	case is(backend.ErrQueueFull):
		return problem(codeQueueFull, say).retry(comeAgain)
	case is(backend.ErrLimitMismatch):
		return problem(codeLimit, say)
	case is(backend.ErrUnsupported):
		return problem(codeUnsupported, say)
	case is(backend.ErrUnknown):
		return problem(codeUnknown, say+"; send it again with the same requestId").retry(comeAgain)
	case errors.As(err, &held):
		p := problem(codeHeld, say).retry(held.RetryAfter)
		p.CurrentOwner = held.Holder
		return p
	case is(backend.ErrHeld):
		return problem(codeHeld, say)
	case errors.As(err, &notHeld):
		p := problem(codeExpired, say)
		p.Reason = string(notHeld.Reason)
		return p
	case is(backend.ErrNotHeld):
		return problem(codeExpired, say)
	case is(backend.ErrCompacted):
		return problem(codeCompacted, say)
	case is(backend.ErrClosed), is(backend.ErrUnavailable), is(context.Canceled), is(context.DeadlineExceeded):
		return problem(codeUnavailable, say).retry(comeAgain)
	}
	return problem(codeInternal, internalSentence)
}

// maxFaults bounds the faults of a request that one answer lists.
const maxFaults = 10

// The errors of huma itself become problems too. huma can be configured only by these package variables.
func init() {
	huma.ValidateStrictCasing, huma.DefaultArrayNullable = true, false
	huma.NewError = func(status int, message string, errs ...error) huma.StatusError {
		for i, err := range errs {
			if i == maxFaults {
				message += fmt.Sprintf("; and %d more", len(errs)-i)
				break
			}
			var detail huma.ErrorDetailer
			switch {
			case errors.As(err, &detail): // without the value, which may be a secret
				d := detail.ErrorDetail()
				message += "; " + d.Location + ": " + d.Message
			case err != nil:
				message += "; " + err.Error()
			}
		}
		if status == http.StatusInternalServerError {
			return problem(codeInternal, internalSentence)
		}
		return problem(codeRequest, message)
	}
}
