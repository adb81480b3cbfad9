package check

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Cutting intervals and dividing the history changes no verdict: small random histories have the same verdict in one
// search with the recorded intervals. No scan finds a violation in a legal history.
func TestSearchCutsNothingOff(t *testing.T) {
	legal, illegal := 0, 0
	for seed := range uint64(6000) {
		random := rand.New(rand.NewPCG(seed, 0))
		h := scribble(random)
		r := gather(h, Rules{Fencing: seed%2 == 0})
		if len(r.malformed) > 0 {
			t.Fatal(r.malformed)
		}
		for _, n := range r.names {
			plain := &part{ops: r.uncut(n), holds: n.holds, rules: r.rules}
			want := porcupine.CheckOperationsTimeout(plain.model(), plain.ops, 20*time.Second)
			if want == porcupine.Unknown {
				continue
			}
			if want == porcupine.Ok {
				legal++
			} else {
				illegal++
			}
			var scans Report
			if scans.scan(r); scans.illegal(n.name) && want == porcupine.Ok {
				t.Fatalf("seed %d: there is an order, although %s\n%s", seed, scans.Text(), script(h))
			}
			if got := searchAlone(h, r.rules); got != (want == porcupine.Ok) {
				t.Fatalf("seed %d: legal %v, without cuts %v\n%s", seed, got, want, script(h))
			}
		}
	}
	if legal < 500 || illegal < 500 {
		t.Errorf("%d legal and %d illegal histories tell too little", legal, illegal)
	}
	t.Logf("%d legal, %d illegal", legal, illegal)
}

// scribble makes a little history of random events. No two instants are the same.
func scribble(random *rand.Rand) History {
	s := tell()
	free := random.Perm(400)
	instants := func(n int) []int { // sorted, close to each other
		at := 1 + random.IntN(300)
		var some []int
		for range n {
			at += 1 + random.IntN(25)
			for !slices.Contains(free, at) {
				at++
			}
			free = slices.DeleteFunc(free, func(x int) bool { return x == at })
			some = append(some, at)
		}
		return some
	}
	for i := range 500 { // beyond all instants
		free = append(free, 400+i)
	}
	kinds := random.IntN(3)
	token := 0
	for i := range 2 + random.IntN(5) {
		token = max(1, token+1-2*(random.IntN(8)/7)) // mostly up
		who, at := string(rune('a'+i)), instants(4)
		deadline := at[1] + 20 + random.IntN(100)
		var id uint64
		switch {
		case kinds == 2:
			id = s.permits(who, at[0], at[1], fencing.Token(token), deadline, 1+random.IntN(2), 3)
		case kinds == 1 && random.IntN(2) == 0:
			id = s.share(who, at[0], at[1], fencing.Token(token), deadline)
		default:
			id = s.grab(who, at[0], at[1], fencing.Token(token), deadline)
		}
		switch random.IntN(5) {
		case 0: // expires
		case 1:
			s.give(who, id, at[2], at[3], Unknown)
		case 2:
			s.give(who, id, at[2], at[3], Gone)
		default:
			s.give(who, id, at[2], at[3], OK)
		}
	}
	if random.IntN(3) == 0 {
		at := instants(2)
		s.ask("z", at[0], at[1], fencing.Token(1+random.IntN(3)), fencing.Token(4).NotExclusive())
	}
	return s.history()
}

// uncut makes the operations of the model with the recorded intervals.
func (r *run) uncut(n *name) []porcupine.Operation {
	ops := r.operations(n)
	for i := range ops {
		in := ops[i].Input.(input)
		if in.do == ask {
			continue
		}
		h := n.holds[in.hold]
		switch in.do {
		case take:
			ops[i].Call = int64(h.call)
		case give:
			ops[i].Return = int64(h.relRet)
			if h.relOut == Unknown {
				ops[i].Return = int64(never)
			}
		case expire:
			ops[i].Return = int64(never)
			if to := max(h.relRet, backend.Instant(ops[i].Call)); h.relOut == OK || h.relOut == Gone {
				ops[i].Return = int64(to)
			}
		}
	}
	return ops
}
