package pagetest_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/internal/gateway"
)

// patience bounds what a busy machine may take.
const patience = time.Minute

// browser is one chromium, for all tests.
var browser = sync.OnceValues(func() (context.Context, error) {
	path, err := exec.LookPath("chromium")
	if err != nil {
		return nil, err
	}
	flags := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]),
		chromedp.ExecPath(path), chromedp.NoSandbox, // containers give it none
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("host-resolver-rules", "MAP "+evilHost+" 127.0.0.1"))
	allocator, end := chromedp.NewExecAllocator(context.Background(), flags...)
	ends = append(ends, end)
	ctx, end := chromedp.NewContext(allocator)
	ends = append(ends, end)
	return ctx, chromedp.Do(ctx) // starts it
})

var ends []context.CancelFunc

func TestMain(m *testing.M) {
	code := m.Run()
	for _, end := range slices.Backward(ends) {
		end()
	}
	os.Exit(code)
}

// tab is a page of the browser, and what it asked for.
type tab struct {
	*testing.T
	ctx context.Context

	mu    sync.Mutex // protects the following fields
	asked []string
	wrong []string // errors that the page logged
}

func open(t *testing.T) *tab {
	t.Helper()
	ctx, err := browser()
	if err != nil {
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatalf("chromium is required (apt-get install chromium): %v", err)
		}
		t.Skipf("no chromium: apt-get install chromium: %v", err)
	}
	x := &tab{T: t}
	ctx, end := chromedp.NewContext(ctx)
	t.Cleanup(end)
	ctx, end = context.WithTimeout(ctx, 2*patience)
	t.Cleanup(end)
	x.ctx = ctx
	x.do() // opens the tab
	err = chromedp.Listen(ctx, func(e any) {
		x.mu.Lock()
		defer x.mu.Unlock()
		switch e := e.(type) {
		case *network.EventRequestWillBeSent:
			x.asked = append(x.asked, e.Request.URL)
		case *runtime.EventExceptionThrown:
			x.wrong = append(x.wrong, fmt.Sprintf("%+v", e.ExceptionDetails))
		}
	})
	if err == nil {
		_, err = chromedp.Call(ctx, network.Enable, network.EnableParams{})
	}
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// do carries out actions.
func (x *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	x.Helper()
	if err := chromedp.Do(x.ctx, actions...); err != nil {
		x.Fatal(err)
	}
}

// value evaluates an expression in the page.
func value[T any](x *tab, expression string) T {
	x.Helper()
	v, err := chromedp.Run(x.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		x.Fatalf("%s: %v", expression, err)
	}
	return v
}

// await waits until an expression is true in the page. The page's policy permits no predicate that it would evaluate
// itself.
func (x *tab) await(what, expression string) {
	x.Helper()
	for deadline := time.Now().Add(patience); !value[bool](x, "("+expression+") ? true : false"); {
		if time.Now().After(deadline) {
			x.Fatalf("not so: %s; the page has\n%s", what, value[string](x, "document.body.innerText"))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// colours has the system prefer a colour scheme.
func (x *tab) colours(scheme string) {
	x.Helper()
	_, err := chromedp.Call(x.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	})
	if err != nil {
		x.Fatal(err)
	}
}

// text awaits an element with a text that contains what is wanted.
func (x *tab) text(selector, want string) {
	x.Helper()
	x.await(selector+" has "+want, fmt.Sprintf("document.querySelector(%q)?.innerText.includes(%q)", selector, want))
}

// texts awaits a list of elements that begin with what is wanted, in this order.
func (x *tab) texts(selector string, want ...string) {
	x.Helper()
	quoted := make([]string, len(want))
	for i := range want {
		quoted[i] = fmt.Sprintf("%q", want[i])
	}
	x.await(selector+" is "+strings.Join(want, ", "), fmt.Sprintf(
		"((all, want) => all.length === want.length && want.every((w, i) => all[i].innerText.startsWith(w)))"+
			"([...document.querySelectorAll(%q)], [%s])", selector, strings.Join(quoted, ", ")))
}

// done fails for an exception, and for a request to anything but the gateway.
func (x *tab) done(origin string) {
	x.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, text := range x.wrong {
		x.Errorf("the page threw %s", text)
	}
	if len(x.asked) == 0 {
		x.Error("the page asked for nothing")
	}
	for _, url := range x.asked {
		if !strings.HasPrefix(url, origin+"/") && url != "data:," {
			x.Errorf("the page asked for %s", url)
		}
	}
}

// service is a gateway in front of a driver.
func service(t *testing.T, d backend.Driver, change func(*gateway.Options)) string {
	t.Helper()
	o := gateway.Options{Driver: d, Log: slog.New(slog.DiscardHandler), Version: "v1"}
	if change != nil {
		change(&o)
	}
	g, err := gateway.New(o)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(g.Handler())
	t.Cleanup(func() {
		g.End()
		s.CloseClientConnections() // the browser keeps its own
		s.Close()
		g.Close(context.Background())
	})
	return s.URL
}

func request(name, owner string) backend.Request {
	id := backend.NewRequestID()
	return backend.Request{Name: name, Owner: owner, RequestID: id, HoldID: backend.HoldID(id), TTL: time.Hour}
}

func take(t *testing.T, d backend.Driver, r backend.Request) backend.Grant {
	t.Helper()
	g, err := d.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// wait queues a request, and returns its grant later.
func wait(t *testing.T, store *memory.Store, r backend.Request) <-chan backend.Grant {
	t.Helper()
	d := store.Driver()
	before, err := d.Look(t.Context(), r.Name)
	if err != nil {
		t.Fatal(err)
	}
	granted := make(chan backend.Grant, 1)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); _ = d.Close(context.Background()) })
	r.Wait = true
	go func() {
		if g, err := d.Acquire(ctx, r); err == nil {
			granted <- g
		}
	}()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		s, err := d.Look(t.Context(), r.Name)
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("%q does not wait: %+v, %v", r.Owner, s, err)
		}
		if s.Waiters > before.Waiters {
			return granted
		}
	}
}

func release(t *testing.T, d backend.Driver, g backend.Grant) {
	t.Helper()
	if err := d.Release(t.Context(), g); err != nil {
		t.Fatal(err)
	}
}

// A grant appears while the page is open; search and sorting work with the keyboard alone.
func TestGrantAppearsLive(t *testing.T) {
	t.Parallel()
	x := open(t)
	store := memory.NewStore(nil)
	d := store.Driver()
	url := service(t, d, nil)
	take(t, d, request("reports/<b>daily</b>", "old & first"))
	x.do(chromedp.Navigate(url + "/"))
	x.texts("#list tbody tr td:first-child", "reports/<b>daily</b>")
	x.text("#list tbody tr", "old & first")
	x.text("#state", "live")

	take(t, d, request("orders/7", "worker-1"))
	wait(t, store, request("orders/7", "worker-2"))
	x.texts("#list tbody tr td:first-child", "orders/7", "reports/<b>daily</b>") // the longest queue comes first
	x.text("#count", "2 locks are held")

	x.do(chromedp.Focus(chromedp.CSS("#list th[data-sort=name] button")), chromedp.KeyEvent("\r"))
	x.await("the names are sorted", `document.querySelector("th[data-sort=name]").getAttribute("aria-sort") === "ascending"`)
	x.do(chromedp.Focus(chromedp.CSS("#list th[data-sort=age] button")), chromedp.KeyEvent(" "))
	x.texts("#list tbody tr td:first-child", "reports/<b>daily</b>", "orders/7")
	x.do(chromedp.Focus(chromedp.CSS("#prefix")), chromedp.KeyEvent("ord"))
	x.texts("#list tbody tr td:first-child", "orders/7")

	x.do(chromedp.Focus(chromedp.CSS("#list tbody a")), chromedp.KeyEvent("\r"))
	x.text("#lock-title", "orders/7")
	x.texts("#holders li", "worker-1")
	x.texts("#queue li", "worker-2")
	x.done(url)
}

// A waiter moves up when the one before it is granted, and events come as they happen.
func TestWaiterMovesUp(t *testing.T) {
	t.Parallel()
	x := open(t)
	store := memory.NewStore(nil)
	d := store.Driver()
	url := service(t, d, nil)
	const name = "a/b ?#é"
	g := take(t, d, request(name, "first"))
	second := wait(t, store, request(name, "second"))
	wait(t, store, request(name, "third"))
	x.do(chromedp.Navigate(url + "/#/lock/a%2Fb%20%3F%23%C3%A9"))
	x.text("#lock-title", name)
	x.texts("#holders li", "first")
	x.texts("#queue li", "second", "third")

	release(t, d, g)
	x.texts("#holders li", "second")
	x.texts("#queue li", "third")
	x.text("#queue-note", "")
	g = <-second
	if err := d.ForceRelease(t.Context(), backend.ForceRequest{Name: name, Reason: "a drill", By: "Ann"}); err != nil {
		t.Fatal(err)
	}
	x.texts("#holders li", "third")
	x.texts("#queue li")
	x.text("#events", "force-released second")
	x.text("#events", "by Ann")
	x.text("#queue-note", "Nobody waits.")
	x.done(url)
}

// A backend without watch, list and queue is shown as far as it answers.
func TestPageOfABackendWithFewerFields(t *testing.T) {
	t.Parallel()
	x := open(t)
	d := memory.NewStore(nil).Driver()
	less := &poor{Driver: d, looks: d}
	url := service(t, less, nil)
	g := take(t, d, request("x", "first"))
	x.do(chromedp.Navigate(url + "/"))
	x.text("#count", "cannot list")
	x.do(chromedp.Navigate(url + "/#/lock/x"))
	x.texts("#holders li", "first")
	x.text("#queue-note", "does not tell who waits")
	x.text("#lock .columns", "there is no replay")
	release(t, d, g)
	x.text("#summary", "Nobody holds it")
	x.done(url)
}

// poor is a driver that can be asked who holds one name.
type poor struct {
	backend.Driver
	looks backend.Inspector
}

func (d *poor) Describe() backend.Description {
	s := d.Driver.Describe()
	s.Capabilities &= backend.CapInspect
	s.Shows = backend.Shows{}
	return s
}

func (d *poor) Look(ctx context.Context, name string) (backend.State, error) {
	s, err := d.looks.Look(ctx, name)
	s.Waiters, s.Queue = 0, nil
	return s, err
}

// Members and limits are shown, and what is wrong with a member.
func TestService(t *testing.T) {
	t.Parallel()
	x := open(t)
	url := service(t, memory.NewStore(nil).Driver(), func(o *gateway.Options) {
		o.Service = func(context.Context) gateway.Service {
			return gateway.Service{
				Members: []gateway.ServiceMember{
					{Address: "a:7480", Role: "leader", Term: 3, Applied: 17, Version: "v1"},
					{Address: "b:7480", Role: "unreachable", Error: "refused"},
				},
				Limits: []gateway.ServiceLimit{{What: "holds", Used: 5, Limit: 1000}},
			}
		}
	})
	x.do(chromedp.Navigate(url + "/#/service"))
	x.texts("#members tbody tr", "a:7480", "b:7480")
	x.text("#members", "unreachable: refused")
	x.text("#limits", "1000")
	x.text("#service", "in-process")
	x.done(url)
}

// Text of clients is never read as HTML, and a module from elsewhere would not run.
func TestPolicy(t *testing.T) {
	t.Parallel()
	x := open(t)
	d := memory.NewStore(nil).Driver()
	url := service(t, d, nil)
	evil := `<img src=x onerror="window.evil=1"><script>window.evil=1</script>`
	r := request("evil", evil)
	r.Metadata = map[string]string{"trace": evil}
	take(t, d, r)
	x.do(chromedp.Navigate(url + "/#/lock/evil"))
	x.text("#holders li", "onerror")
	ran := value[bool](x, `(() => {
		const s = document.createElement("div")
		try { s.innerHTML = "<img src=x onerror='window.evil=1'>" } catch { }
		document.body.append(s)
		return "evil" in window
	})()`)
	if ran {
		t.Error("text of a client ran")
	}
	x.done(url)
}

// The page fits a phone, and follows the colours of the system.
func TestPhoneAndDark(t *testing.T) {
	t.Parallel()
	x := open(t)
	store := memory.NewStore(nil)
	d := store.Driver()
	url := service(t, d, nil)
	for i := range 12 {
		take(t, d, request(fmt.Sprintf("orders/%d/a-name-that-is-rather-long-for-a-phone", i), "host-3/4711/worker"))
	}
	x.colours("dark")
	x.do(chromedp.EmulateViewport(360, 740, chromedp.EmulateMobile), chromedp.Navigate(url+"/"))
	x.await("12 locks", `document.querySelectorAll("#list tbody tr").length === 12`)
	width := value[int](x, "document.documentElement.scrollWidth")
	colour := value[string](x, "getComputedStyle(document.body).backgroundColor")
	if width > 360 {
		t.Errorf("the page is %d pixels wide on a phone of 360", width)
	}
	if colour != "rgb(15, 19, 24)" {
		t.Errorf("the page is %s in the dark", colour)
	}
	x.done(url)
}

// Switched off, there is no page.
func TestNoPage(t *testing.T) {
	t.Parallel()
	url := service(t, memory.NewStore(nil).Driver(), func(o *gateway.Options) { o.NoPage = true })
	for _, path := range []string{"/", "/page.js", "/page.css", "/page/service"} {
		r, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, r.Body)
		_ = r.Body.Close()
		if r.StatusCode != http.StatusNotFound {
			t.Errorf("%s is answered %d, want 404", path, r.StatusCode)
		}
	}
}

// TestScreenshots writes those of the documentation. It needs a service: FENCELOCK_PAGE is the address of a gateway.
func TestScreenshots(t *testing.T) {
	url := os.Getenv("FENCELOCK_PAGE")
	if url == "" {
		t.Skip("FENCELOCK_PAGE is not set")
	}
	x := open(t)
	shot := func(file string) {
		t.Helper()
		x.do(chromedp.Sleep(3 * time.Second)) // what is fresh fades
		picture, err := chromedp.Run(x.ctx, chromedp.CaptureScreenshot())
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(os.Getenv("FENCELOCK_SHOTS"), file), picture, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	lock := os.Getenv("FENCELOCK_PAGE_LOCK")
	x.colours("light")
	x.do(chromedp.EmulateViewport(1100, 720), chromedp.Navigate(url+"/"))
	x.text("#state", "live")
	shot("page-locks.png")
	x.do(chromedp.Navigate(url + "/#/lock/" + lock))
	shot("page-lock.png")
	x.do(chromedp.Navigate(url + "/#/service"))
	shot("page-service.png")
	x.colours("dark")
	x.do(chromedp.Navigate(url + "/#/"))
	shot("dark.png")
	x.do(chromedp.EmulateViewport(390, 800, chromedp.EmulateMobile), chromedp.Navigate(url+"/#/"))
	shot("phone-dark.png")
	x.colours("light")
	x.do(chromedp.Navigate(url + "/#/lock/" + lock))
	shot("phone.png")
}
