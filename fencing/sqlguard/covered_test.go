package sqlguard_test

import (
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// coverage is a table, how it came to be, and what is to be said of it; "" is covered.
type coverage struct {
	table, want string
	setup       []string
}

// covered makes the tables, and compares what Covered says of them.
func (d database) covered(t *testing.T, dsn, resource string, cases []coverage) {
	ctx, db := t.Context(), d.connect(t, dsn)
	var names []string
	for _, c := range cases {
		names = append(names, c.table)
		for _, query := range c.setup {
			queries := []string{query}
			if table, ok := strings.CutPrefix(query, "ENFORCE "); ok {
				var err error
				if queries, err = sqlguard.Enforce(d.dialect, table, resource, ""); err != nil {
					t.Fatal(err)
				}
			}
			for _, each := range queries {
				if _, err := db.ExecContext(ctx, each); err != nil {
					t.Fatalf("%s: %v", each, err)
				}
			}
		}
	}
	find := func(names ...string) map[string][]string {
		all, err := sqlguard.Covered(ctx, db, d.dialect, "", names...)
		if err != nil {
			t.Fatal(err)
		}
		found := map[string][]string{}
		for _, each := range all {
			found[strings.TrimPrefix(each.Table, "public.")] = each.Holes
		}
		return found
	}
	all, found := find(), find(append(names, "nowhere")...)
	for _, c := range cases {
		holes, known := found[c.table]
		if text := strings.Join(holes, "; "); !known || (text == "") != (c.want == "") || !strings.Contains(text, c.want) {
			t.Errorf("%s: %q (known: %v), want %q", c.table, text, known, c.want)
		}
		if !slices.Equal(all[c.table], holes) {
			t.Errorf("%s: %q among all tables, and %q by its name", c.table, all[c.table], holes)
		}
	}
	if got := strings.Join(found["nowhere"], ""); got != "there is no such table" || len(found) != len(cases)+1 {
		t.Errorf("a table that is not there: %q; %d tables, want %d", got, len(found), len(cases)+1)
	}
	for _, table := range []string{"fencing_tokens", "fencing_tokens_shown"} {
		if _, listed := all[table]; listed {
			t.Errorf("the guard's own table %s is listed", table)
		}
	}
}

const notCovered = "it has no trigger"

func (d database) coveredPostgreSQL(t *testing.T, dsn string) {
	d.covered(t, dsn, "'x/' || row.id", []coverage{
		{"c_plain", notCovered, []string{`CREATE TABLE c_plain (id int)`}},
		{"c_good", "", []string{`CREATE TABLE c_good (id int)`, `ENFORCE c_good`}},
		{"c_disabled", "trigger fencing is disabled", []string{
			`CREATE TABLE c_disabled (id int)`, `ENFORCE c_disabled`, `ALTER TABLE c_disabled DISABLE TRIGGER fencing`,
		}},
		{"c_truncated", "TRUNCATE is not refused", []string{
			`CREATE TABLE c_truncated (id int)`, `ENFORCE c_truncated`, `DROP TRIGGER fencing_truncate ON c_truncated`,
		}},
		{"c_early", "runs before others", []string{
			`CREATE TABLE c_early (id int)`, `ENFORCE c_early`, `DROP TRIGGER fencing ON c_early`,
			`CREATE TRIGGER fencing BEFORE INSERT OR UPDATE OR DELETE ON c_early FOR EACH ROW EXECUTE FUNCTION c_early_fencing()`,
		}},
		{"c_narrow", "has a condition", []string{
			`CREATE TABLE c_narrow (id int)`, `ENFORCE c_narrow`, `DROP TRIGGER fencing ON c_narrow`,
			`CREATE TRIGGER fencing AFTER INSERT OR UPDATE OF id OR DELETE ON c_narrow FOR EACH ROW EXECUTE FUNCTION c_narrow_fencing()`,
		}},
		{"c_inserts", "no trigger sees UPDATE, DELETE", []string{
			`CREATE TABLE c_inserts (id int)`, `ENFORCE c_inserts`, `DROP TRIGGER fencing ON c_inserts`,
			`CREATE TRIGGER fencing AFTER INSERT ON c_inserts FOR EACH ROW EXECUTE FUNCTION c_inserts_fencing()`,
		}},
		{"c_parent", "", []string{`CREATE TABLE c_parent (id int)`, `ENFORCE c_parent`}},
		{"c_child", notCovered + ", and inherits from c_parent", []string{`CREATE TABLE c_child () INHERITS (c_parent)`}},
		{"c_parts", "", []string{
			`CREATE TABLE c_parts (id int) PARTITION BY RANGE (id)`,
			`CREATE TABLE c_part_1 PARTITION OF c_parts FOR VALUES FROM (0) TO (10)`, `ENFORCE c_parts`,
		}},
		{"c_part_1", "TRUNCATE is not refused", nil},
		{"c_part_2", "TRUNCATE is not refused", []string{`CREATE TABLE c_part_2 PARTITION OF c_parts FOR VALUES FROM (10) TO (20)`}},
		{"c_part_3", notCovered, []string{
			`CREATE TABLE c_part_3 PARTITION OF c_parts FOR VALUES FROM (20) TO (30)`, `ALTER TABLE c_parts DETACH PARTITION c_part_3`,
			`DROP TRIGGER IF EXISTS fencing ON c_part_3`,
		}},
		{"c_subscribed", "a subscription writes to it", []string{
			`CREATE TABLE c_subscribed (id int)`, `ENFORCE c_subscribed`,
			`CREATE SUBSCRIPTION c_sub CONNECTION '' PUBLICATION c_pub WITH (connect = false)`,
			`INSERT INTO pg_subscription_rel SELECT oid, 'c_subscribed'::regclass, 'r' FROM pg_subscription`,
		}},
		{"c_swapped_old", "", []string{
			`CREATE TABLE c_swapped (id int)`, `ENFORCE c_swapped`, `ALTER TABLE c_swapped RENAME TO c_swapped_old`,
		}},
		{"c_swapped", "on public.c_swapped_old, so the tables were swapped", []string{`CREATE TABLE c_swapped (id int)`}},
	})
	// With another guard's triggers.
	ctx, db := t.Context(), d.connect(t, dsn)
	if err := must(t, db, d.dialect, &sqlguard.Options{Table: "c_guard"}).Create(ctx); err != nil {
		t.Fatal(err)
	}
	text, err := sqlguard.Enforce(d.dialect, "c_good", "'x/' || row.id", "c_guard")
	if err != nil {
		t.Fatal(err)
	}
	for _, each := range text {
		if _, err := db.ExecContext(ctx, each); err != nil {
			t.Fatal(err)
		}
	}
	all, err := sqlguard.Covered(ctx, db, d.dialect, "", "c_good")
	if err != nil || len(all) != 1 || !strings.Contains(strings.Join(all[0].Holes, ""), "asks public.c_guard, where") {
		t.Errorf("with the triggers of another guard: %+v, %v", all, err)
	}
}

func (d database) coveredMySQL(t *testing.T, dsn string) {
	d.covered(t, dsn, "CONCAT('x/', row.id)", []coverage{
		{"c_plain", notCovered, []string{`CREATE TABLE c_plain (id int)`}},
		{"c_good", "", []string{`CREATE TABLE c_good (id int)`, `ENFORCE c_good`}},
		{"c_inserts", "no trigger sees UPDATE, DELETE", []string{
			`CREATE TABLE c_inserts (id int)`, `ENFORCE c_inserts`, `DROP TRIGGER c_inserts_fencing_update`,
			`DROP TRIGGER c_inserts_fencing_delete`,
		}},
		{"c_engine", "MyISAM", []string{`CREATE TABLE c_engine (id int) ENGINE=MyISAM`, `ENFORCE c_engine`}},
		{"c_swapped_old", "", []string{
			`CREATE TABLE c_swapped (id int)`, `ENFORCE c_swapped`, `CREATE TABLE c_swapped_new LIKE c_swapped`,
			`RENAME TABLE c_swapped TO c_swapped_old, c_swapped_new TO c_swapped`,
		}},
		{"c_swapped", "on c_swapped_old, so the tables were swapped", nil},
		{"c_child", "changes rows without triggers when c_owner changes", []string{
			`CREATE TABLE c_owner (id int PRIMARY KEY)`,
			`CREATE TABLE c_child (id int, FOREIGN KEY (id) REFERENCES c_owner (id) ON DELETE CASCADE)`, `ENFORCE c_child`,
		}},
		{"c_kept", "", []string{
			`CREATE TABLE c_kept (id int, FOREIGN KEY (id) REFERENCES c_owner (id))`, `ENFORCE c_kept`,
		}},
	})
}

func (d database) coveredSQLite(t *testing.T, dsn string) {
	d.covered(t, dsn, "'x/' || row.id", []coverage{
		{"c_plain", notCovered, []string{`CREATE TABLE c_plain (id int)`}},
		{"c_good", "", []string{`CREATE TABLE c_good (id int)`, `ENFORCE c_good`}},
		{"c_inserts", "no trigger sees UPDATE, DELETE", []string{
			`CREATE TABLE c_inserts (id int)`, `ENFORCE c_inserts`, `DROP TRIGGER c_inserts_fencing_update`,
			`DROP TRIGGER c_inserts_fencing_delete`,
		}},
		{"c_swapped_old", "", []string{
			`CREATE TABLE c_swapped (id int)`, `ENFORCE c_swapped`, `ALTER TABLE c_swapped RENAME TO c_swapped_old`,
		}},
		{"c_swapped", "on c_swapped_old, so the tables were swapped", []string{`CREATE TABLE c_swapped (id int)`}},
	})
	ctx, db := t.Context(), d.connect(t, dsn)
	all, err := sqlguard.Covered(ctx, db, d.dialect, "other", "c_good")
	if err != nil || len(all) != 1 || !strings.Contains(strings.Join(all[0].Holes, ""), "where the guard does not remember") {
		t.Errorf("for another guard: %+v, %v", all, err)
	}
}

func TestCoveredRefuses(t *testing.T) {
	for _, guard := range []string{"", "a-b"} {
		if _, err := sqlguard.Covered(t.Context(), new(sql.DB), 0, guard); !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("Covered of no dialect with the guard %q = %v, want ErrInvalid", guard, err)
		}
	}
}
