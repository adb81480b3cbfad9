// The page of the gateway. It reads what everybody may read over HTTP, and changes nothing.

const $ = (id) => document.getElementById(id)
const declares = (what) => document.body.dataset[what] === 'true'

const listEvery = 2000 // milliseconds between two lists
const lookEvery = 1000 // between two looks at one lock; its events are pushed
const pages = 5 // of 1000 names at most
const eventsKept = 100

// element makes an element with text and children. Text is never read as HTML.
function element(tag, attributes, ...children) {
	const e = document.createElement(tag)
	for (const [name, value] of Object.entries(attributes)) {
		if (value !== undefined) e.setAttribute(name, value)
	}
	e.append(...children.filter((c) => c !== undefined && c !== ''))
	return e
}

function duration(ms) {
	const s = Math.max(0, Math.floor(ms / 1000))
	if (s < 60) return s + ' s'
	if (s < 3600) return Math.floor(s / 60) + ' min ' + (s % 60) + ' s'
	if (s < 86400) return Math.floor(s / 3600) + ' h ' + Math.floor((s % 3600) / 60) + ' min'
	return Math.floor(s / 86400) + ' d ' + Math.floor((s % 86400) / 3600) + ' h'
}

const age = (since) => (since ? duration(Date.now() - since) : '')

function tell(text, good) {
	$('state').textContent = text
	$('state').className = good ? 'good' : 'bad'
}

// ask returns the JSON of an answer; 404 of a lock is an answer, too. Its ETag names the state.
async function ask(path, signal) {
	const r = await fetch(path, { signal, headers: { Accept: 'application/json' } })
	const body = await r.json()
	if (!r.ok && !(r.status === 404 && 'locked' in body)) throw new Error(body.detail || body.title || r.statusText)
	body.etag = r.headers.get('ETag') ?? ''
	return body
}

// fill makes the children of a list or a table body what rows say. Rows that stay keep their element, and the focus in it.
function fill(parent, rows, make) {
	const there = new Map([...parent.children].map((e) => [e.dataset.key, e]))
	const began = there.size > 0 || parent.dataset.filled
	let at = parent.firstElementChild
	for (const row of rows) {
		const fresh = make(row)
		fresh.dataset.key = row.key
		let e = there.get(row.key)
		there.delete(row.key)
		if (!e) {
			e = fresh
			if (began) e.classList.add('fresh')
		} else if (e.innerHTML !== fresh.innerHTML) {
			const focused = e.contains(document.activeElement)
			e.replaceChildren(...fresh.childNodes)
			if (focused) e.querySelector('a')?.focus()
		}
		if (e === at) at = at.nextElementSibling
		else parent.insertBefore(e, at)
	}
	for (const gone of there.values()) gone.remove()
	parent.dataset.filled = 'yes'
}

// Locks.

let sorting = declares('waiters') ? 'queue' : declares('since') ? 'age' : 'name'

const oldest = (lock) => Math.min(...(lock.holders ?? []).map((h) => h.since ?? Infinity), Infinity)
const orders = {
	name: (a, b) => (a.lockKey < b.lockKey ? -1 : 1),
	queue: (a, b) => (b.waiters ?? 0) - (a.waiters ?? 0) || orders.name(a, b),
	age: (a, b) => (oldest(a) === oldest(b) ? 0 : oldest(a) - oldest(b)) || orders.name(a, b),
}

async function list(signal) {
	const prefix = $('prefix').value
	let locks = [], after = '', more = true
	for (let n = 0; n < pages && more; n++) {
		const page = await ask('/v1/locks?limit=1000&prefix=' + encodeURIComponent(prefix) + '&after=' + encodeURIComponent(after), signal)
		locks = locks.concat(page.locks ?? [])
		after = page.nextAfter ?? ''
		more = after !== ''
	}
	if (signal.aborted) return
	locks.sort(orders[sorting])
	const shown = locks.slice(0, 500)
	let text = locks.length === 1 ? '1 lock is held' : locks.length + ' locks are held'
	if (more) text = 'More than ' + text + ': give the beginning of a name'
	else if (shown.length < locks.length) text += ', of which the first 500 are shown'
	if ($('count').textContent !== text) $('count').textContent = text
	fill($('list').tBodies[0], shown.map((l) => ({ ...l, key: l.lockKey })), row)
}

function row(lock) {
	const first = lock.holders?.[0] ?? {}
	const others = (lock.holders?.length ?? 0) - 1
	const owner = (first.ownerId ?? '') + (others > 0 ? ' and ' + others + ' more' : '')
	let kind = first.kind ?? ''
	if (lock.remainingPermits !== undefined) kind += ', ' + lock.remainingPermits + ' of ' + lock.limit + ' free'
	const cell = (label, text, number) => element('td', { 'data-label': label, class: number ? 'number' : undefined }, String(text))
	const since = oldest(lock)
	return element('tr', {},
		element('td', {}, element('a', { href: '#/lock/' + encodeURIComponent(lock.lockKey) }, lock.lockKey)),
		cell('Owner', owner), cell('Kind', kind),
		cell('Waiters', declares('waiters') ? lock.waiters ?? 0 : '', true),
		cell('Age', since === Infinity ? '' : age(since), true),
		cell('Expires in', first.expiresInMillis ? duration(first.expiresInMillis) : '', true),
		cell('Token', first.fencingToken ?? '', true))
}

function sort(by) {
	sorting = by
	for (const th of document.querySelectorAll('#list th[data-sort]')) {
		if (th.dataset.sort === by) th.setAttribute('aria-sort', by === 'name' ? 'ascending' : 'descending')
		else th.removeAttribute('aria-sort')
	}
}

// One lock.

let events = []
let source // of the events of the lock that is shown

async function look(name, signal) {
	const lock = await ask('/v1/locks/-?name=' + encodeURIComponent(name), signal)
	if (signal.aborted) return
	if (!source) watch(name, signal, lock.etag)
	const holders = lock.holders ?? [], queue = lock.queue ?? []
	let text = holders.length === 0 ? 'Nobody holds it' : holders.length === 1 ? 'One holder' : holders.length + ' holders'
	if (lock.remainingPermits !== undefined) text += ', ' + lock.remainingPermits + ' of ' + lock.limit + ' permits are free'
	if (lock.waiters) text += lock.waiters === 1 ? ', one waits' : ', ' + lock.waiters + ' wait'
	if ($('summary').textContent !== text) $('summary').textContent = text
	keyed($('holders'), holders, (h) => element('li', {}, element('div', {}, h.ownerId, element('small', {}, [
		h.kind + (h.permits ? ' ' + h.permits : ''), h.fencingToken && 'token ' + h.fencingToken,
		h.since && 'for ' + age(h.since), h.expiresInMillis && 'expires in ' + duration(h.expiresInMillis),
		...Object.entries(h.metadata ?? {}).map(([k, v]) => k + ': ' + v),
	].filter(Boolean).join(' · ')))))
	keyed($('queue'), queue, (w) => element('li', {}, element('div', {}, w.ownerId, element('small', {}, [
		w.kind + (w.permits ? ' ' + w.permits : ''), w.since && 'for ' + age(w.since),
	].filter(Boolean).join(' · ')))))
	let note = ''
	if (!declares('queue')) note = 'The backend does not tell who waits.'
	else if (!lock.waiters) note = 'Nobody waits.'
	else if (queue.length < lock.waiters) note = 'and ' + (lock.waiters - queue.length) + ' more'
	if ($('queue-note').textContent !== note) $('queue-note').textContent = note
}

// keyed fills a list with claims. Two of them may have the same id.
function keyed(parent, claims, make) {
	const seen = {}
	fill(parent, claims.map((c) => {
		const id = c.holdId ?? c.ownerId
		seen[id] = (seen[id] ?? 0) + 1
		return { ...c, key: id + ' ' + seen[id] }
	}), make)
}

// watch follows a lock from the state that a look has shown, or from now on where there is no replay.
function watch(name, signal, etag) {
	const since = declares('replay') ? etag.replaceAll('"', '') : ''
	const mine = new EventSource('/v1/locks/-/watch?name=' + encodeURIComponent(name) + (since && '&since=' + since))
	source = mine
	signal.addEventListener('abort', () => mine.close())
	// The browser connects again by itself, unless it was refused: the events that it asks for may be too old.
	mine.addEventListener('error', () => {
		if (mine.readyState !== EventSource.CLOSED || signal.aborted) return
		setTimeout(() => { if (source === mine) source = undefined }, 5 * lookEvery)
	})
	for (const type of ['acquired', 'released', 'expired', 'force-released']) {
		mine.addEventListener(type, (e) => {
			if (signal.aborted) return
			const change = JSON.parse(e.data)
			change.key = String(nextEvent++)
			change.at ??= Date.now()
			events = [change, ...events].slice(0, eventsKept)
			showEvents()
			round()
		})
	}
}

let nextEvent = 1

function showEvents() {
	fill($('events'), events, (c) => element('li', {}, c.type + ' ' + (c.ownerId ?? ''), element('small', {}, [
		new Date(c.at).toLocaleTimeString(), c.fencingToken && 'token ' + c.fencingToken,
		c.by && 'by ' + c.by, c.principal && '(' + c.principal + ')', c.reason,
	].filter(Boolean).join(' · '))))
}

// The service.

async function service(signal) {
	const s = await ask('/page/service', signal)
	if (signal.aborted) return
	$('members').hidden = !s.members?.length
	$('members-note').textContent = s.membersNote ?? ''
	fill($('members').tBodies[0], (s.members ?? []).map((m) => ({ ...m, key: m.address })), (m) => element('tr', {},
		element('td', {}, m.address), element('td', { class: m.error ? 'bad' : undefined }, m.role + (m.error ? ': ' + m.error : '')),
		element('td', { class: 'number' }, String(m.term || '')), element('td', { class: 'number' }, String(m.applied || '')),
		element('td', {}, m.version ?? '')))
	$('limits').hidden = !s.limits?.length
	$('limits-note').textContent = s.limitsNote ?? ''
	fill($('limits').tBodies[0], (s.limits ?? []).map((l) => ({ ...l, key: l.what })), (l) => element('tr', {},
		element('td', {}, l.what), element('td', { class: 'number' }, String(l.used)), element('td', { class: 'number' }, String(l.limit))))
}

// The present view.

let view = { end: new AbortController(), load: async () => {}, every: listEvery }
let timer, asking = false, again = false

// round loads the view, one request after the other, and comes again while the page is seen.
async function round() {
	if (asking) {
		again = true
		return
	}
	clearTimeout(timer)
	asking = true
	const now = view
	try {
		await now.load(now.end.signal)
		if (now === view) tell('live', true)
	} catch (err) {
		if (now === view && err.name !== 'AbortError') tell(err.message, false)
	}
	asking = false
	if (again || now !== view) {
		again = false
		round()
	} else if (!document.hidden) {
		timer = setTimeout(round, now.every)
	}
}

function open() {
	view.end.abort()
	const end = new AbortController()
	const path = location.hash.slice(1)
	let section = 'locks', title = 'Locks'
	if (path.startsWith('/lock/')) {
		section = 'lock'
		try {
			title = decodeURIComponent(path.slice('/lock/'.length))
		} catch {
			title = path.slice('/lock/'.length)
		}
		for (const id of ['holders', 'queue']) {
			$(id).replaceChildren()
			delete $(id).dataset.filled
		}
		$('lock-title').textContent = title
		$('summary').textContent = $('queue-note').textContent = ''
		view = { end, load: (signal) => look(title, signal), every: lookEvery }
		source = undefined
		events = []
		showEvents()
	} else if (path === '/service') {
		section = 'service'
		title = 'Service'
		view = { end, load: service, every: 5000 }
	} else if (declares('list')) {
		view = { end, load: list, every: listEvery }
	} else {
		view = { end, load: async () => { $('count').textContent = 'The backend cannot list its locks.' }, every: 60000 }
	}
	for (const s of document.querySelectorAll('main > section')) s.hidden = s.id !== section
	for (const a of document.querySelectorAll('nav a')) {
		if (a.getAttribute('href') === '#/' + (section === 'service' ? 'service' : '')) a.setAttribute('aria-current', 'page')
		else a.removeAttribute('aria-current')
	}
	document.title = title + ' – Fencelock'
	round()
}

for (const th of document.querySelectorAll('#list th[data-sort]')) {
	th.querySelector('button').addEventListener('click', () => {
		sort(th.dataset.sort)
		round()
	})
}
$('search').addEventListener('submit', (e) => {
	e.preventDefault()
	round()
})
$('prefix').addEventListener('input', round)
document.querySelector('.skip').addEventListener('click', (e) => {
	e.preventDefault()
	$('main').focus()
})
document.addEventListener('visibilitychange', () => { if (!document.hidden) round() })
addEventListener('hashchange', () => {
	open()
	$('main').focus()
	scrollTo(0, 0)
})
sort(sorting)
open()
