package main

import (
	"context"

	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/gateway"
	"github.com/fencelock/fencelock/internal/server"
)

// serviceOf returns the web page's view of a cluster: its members, as a client can ask them, and the limits and their
// use as a server of this process knows them, if there is one.
func serviceOf(admin *builtin.Admin, own *server.Server) func(context.Context) gateway.Service {
	return func(ctx context.Context) gateway.Service {
		s := gateway.Service{LimitsNote: "Only a member of the bundled server tells its limits here."}
		for _, answer := range admin.Status(ctx) {
			m := memberOf(&answer)
			s.Members = append(s.Members, gateway.ServiceMember{
				Address: m.Address, Role: m.Role, Term: m.Term, Applied: m.AppliedIndex, Version: m.Version, Error: m.Error,
			})
		}
		if own == nil {
			return s
		}
		used, limits := own.Used()
		s.LimitsNote, s.Limits = "", []gateway.ServiceLimit{
			{What: "sessions", Used: used.Sessions, Limit: limits.Sessions},
			{What: "holds", Used: used.Holds, Limit: limits.Holds},
			{What: "waits", Used: used.Waits, Limit: limits.Waits},
		}
		return s
	}
}

// serviceAt is serviceOf for a URL; nil if that is not of a cluster of the bundled server.
func serviceAt(rawURL string) func(context.Context) gateway.Service {
	if !isBundled(rawURL) {
		return nil
	}
	admin, err := builtin.OpenAdmin(rawURL)
	if err != nil {
		return nil // opening the backend reports the error
	}
	return serviceOf(admin, nil)
}
