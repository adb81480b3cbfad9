package server

// Errors for a reached limit: EXHAUSTED if there may be room later, INVALID or UNSUPPORTED if a repetition cannot
// succeed. docs/SERVER.md lists the limits.

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
)

// tooMuch maps each limit that a single request can exceed, regardless of others, to the field of the request that
// does. The request is invalid for these servers, and a repetition cannot succeed.
var tooMuch = map[string]string{"NameBytes": "name", "Levels": "name", "MetadataBytes": "metadata"}

// clientError returns the error for a client that has reached its share.
func clientError(field, of string, share, all int) *lockpb.Error {
	return &lockpb.Error{
		Code: lockpb.Code_CODE_EXHAUSTED, Field: field,
		Message: fmt.Sprintf("this client has reached its share, %d of %s, %d; see client-share", share, of, all),
	}
}

// limitError returns the error for the limit that the field names; limits are the cluster's.
func limitError(field string, limits machine.Limits) *lockpb.Error {
	all := limits.All()
	if whole, ok := strings.CutPrefix(field, "Client"); ok {
		for _, l := range all {
			if l.Field == whole {
				share := limits.Share(*l.Value)
				return clientError("client-"+l.Name, "the limit "+l.Name+" of the servers", share, *l.Value)
			}
		}
	}
	i := slices.IndexFunc(all, func(l machine.Limit) bool { return l.Field == field })
	if i < 0 { // it is not configurable
		return &lockpb.Error{
			Code: lockpb.Code_CODE_EXHAUSTED, Field: field, Message: "the servers have come to their end of it",
		}
	}
	if subject, ok := tooMuch[field]; ok {
		return &lockpb.Error{
			Code: lockpb.Code_CODE_INVALID, Field: subject,
			Message: fmt.Sprintf("it exceeds the limit %s of the servers, %d", all[i].Name, *all[i].Value),
		}
	}
	if field == "Requests" { // the names can be acquired one after the other
		return &lockpb.Error{
			Code: lockpb.Code_CODE_UNSUPPORTED, Field: "requests",
			Message: fmt.Sprintf("it exceeds the limit %s of the servers, %d", all[i].Name, *all[i].Value),
		}
	}
	return &lockpb.Error{
		Code: lockpb.Code_CODE_EXHAUSTED, Field: all[i].Name,
		Message: fmt.Sprintf("the limit %s of the servers, %d, is reached", all[i].Name, *all[i].Value),
	}
}
