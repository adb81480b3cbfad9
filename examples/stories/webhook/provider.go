package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

// deliver tells a replica of the payment.
func (p *provider) deliver(ctx context.Context, replica int) error {
	form := strings.NewReader(url.Values{"payment": {payment}}.Encode())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.hooks[replica], form)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	p.story.Tell("replica %d answers %d: %s", replica, resp.StatusCode, strings.TrimSpace(string(text)))
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusServiceUnavailable {
		return fmt.Errorf("replica %d answered %s", replica, resp.Status)
	}
	return nil
}

// amount answers the replicas. The first one waits for so long that the provider abandons it and calls the
// other.
func (p *provider) amount(ctx context.Context) (int, error) {
	if p.asked.Add(1) == 1 {
		p.story.Tell("replica 0 is slow to answer; the provider tells replica 1 meanwhile")
		if err := p.deliver(ctx, 1); err != nil {
			return 0, err
		}
	}
	return 50, nil
}

// open makes the ledger and starts two replicas.
func open(ctx context.Context, s *story.Story, p *provider) (*sql.DB, error) {
	db, guard, err := s.GuardedDatabase(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE ledger (payment TEXT, account TEXT, amount INTEGER)`); err != nil {
		return nil, err
	}
	for i := range 2 {
		locks, err := s.Open(ctx, fencelock.Correctness, fmt.Sprintf("replica-%d", i))
		if err != nil {
			return nil, err
		}
		hook, err := s.Serve(&replica{locks: locks, db: db, guard: guard, provider: p})
		if err != nil {
			return nil, err
		}
		p.hooks = append(p.hooks, hook)
	}
	return db, nil
}
