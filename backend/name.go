package backend

// The rules for names, owners, TTLs and request ids. The core validates before it sends anything, with the
// same functions that a driver uses for callers without a core, so that the two never disagree. Bounds are in bytes,
// because services store bytes.

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// MaxNameBytes bounds a lock's name, in bytes of UTF-8, with the client's namespace. A driver that escapes names has to
// fit the escaped form of the longest one into its service's keys.
const MaxNameBytes = 512

// MaxOwnerBytes bounds Request.Owner, in bytes of UTF-8.
const MaxOwnerBytes = 256

// ValidateName accepts any valid UTF-8 of 1 to MaxNameBytes bytes without control characters. "/" separates the levels
// of a hierarchy where a driver knows one, and is an ordinary character elsewhere. Names are not normalized: two
// spellings of one word are two locks. The error is an *InvalidError and wraps ErrInvalidName.
//
//	"orders/42", "Straße 7", "a b", "*", ".."  are names, and no two of them meet
//	"", "a\n", "\xff"                         are not
func ValidateName(name string) error {
	return validateText(ErrInvalidName, "lock name", name, MaxNameBytes)
}

// ValidateOwner accepts any valid UTF-8 of 1 to MaxOwnerBytes bytes without control characters. The error wraps
// ErrInvalidOption.
func ValidateOwner(owner string) error {
	return validateText(ErrInvalidOption, "owner", owner, MaxOwnerBytes)
}

// MaxMetadataBytes bounds Request.Metadata: keys and values together, in bytes of UTF-8.
const MaxMetadataBytes = 4096

// ValidateMetadata accepts at most MaxMetadataBytes of valid UTF-8 without NUL. The error wraps ErrInvalidOption.
func ValidateMetadata(kv map[string]string) error {
	size := 0
	for k, v := range kv {
		if !utf8.ValidString(k) || !utf8.ValidString(v) || strings.ContainsRune(k, 0) || strings.ContainsRune(v, 0) {
			return &InvalidError{
				Kind: ErrInvalidOption, What: "metadata", Value: fmt.Sprintf("key %.64q", k),
				Why: "key or value is not UTF-8, or contains NUL",
			}
		}
		size += len(k) + len(v)
	}
	if size > MaxMetadataBytes {
		return &InvalidError{
			Kind: ErrInvalidOption, What: "metadata", Value: fmt.Sprintf("of %d bytes", size),
			Why: fmt.Sprintf("it is more than %d bytes", MaxMetadataBytes),
		}
	}
	return nil
}

// validateText refuses control characters because names and owners end up in logs and terminals, and invalid UTF-8
// because it would not come back as it was through services that store text.
func validateText(kind error, what, s string, most int) error {
	why := ""
	switch {
	case s == "":
		why = "it is empty"
	case len(s) > most:
		why = fmt.Sprintf("it has %d bytes, more than %d", len(s), most)
	case !utf8.ValidString(s):
		why = "it is not valid UTF-8"
	default:
		for i, r := range s {
			if unicode.IsControl(r) {
				why = fmt.Sprintf("it has the control character %U at byte %d", r, i)
				break
			}
		}
	}
	if why == "" {
		return nil
	}
	return &InvalidError{Kind: kind, What: what, Value: quoteShort(s), Why: why}
}

// quoteShort quotes s, cut to a length that fits an error message. The cut may split a character; quoting shows that
// and stays valid.
func quoteShort(s string) string {
	const most = 64
	if len(s) <= most {
		return strconv.Quote(s)
	}
	return strconv.Quote(s[:most]) + "…"
}

// ValidateTTL checks ttl against the driver's range and granularity, and that it leaves a positive Validity. It does
// not round. The error is an *InvalidError and wraps ErrInvalidTTL.
func (d Description) ValidateTTL(ttl time.Duration) error {
	why := ""
	switch {
	case ttl <= 0:
		why = "it is not positive"
	case ttl < d.MinTTL:
		why = fmt.Sprintf("driver %s takes no less than %v", d.Name, d.MinTTL)
	case d.MaxTTL > 0 && ttl > d.MaxTTL:
		why = fmt.Sprintf("driver %s takes no more than %v", d.Name, d.MaxTTL)
	case d.TTLGranularity > 0 && ttl%d.TTLGranularity != 0:
		why = fmt.Sprintf("driver %s takes multiples of %v and nothing is rounded silently", d.Name, d.TTLGranularity)
	case d.Validity(ttl) <= 0:
		why = fmt.Sprintf("the safety margin of %v leaves no time to hold the lock", ttl-d.Validity(ttl))
	}
	if why == "" {
		return nil
	}
	return &InvalidError{Kind: ErrInvalidTTL, What: "TTL", Value: ttl.String(), Why: why}
}

// MaxUnder bounds Request.Under. The core sends the innermost holds where there are more.
const MaxUnder = 64

// HoldID returns the public form of a request id: the first 128 bits of its SHA-256, in hexadecimal. Every client
// gets the same result from the same id, so that a restarted process recognizes the hold of its predecessor; the id
// cannot be computed from it, since the id has 128 random bits. The hashed text has a prefix, so that the result
// differs from other hashes of the same id.
func HoldID(requestID string) string {
	sum := sha256.Sum256([]byte("fencelock hold id\x00" + requestID))
	return hex.EncodeToString(sum[:16])
}

// NewRequestID returns 128 random bits in hexadecimal, 32 characters. It never fails: crypto/rand ends the program when
// the system has no randomness, which is better than a key that an attacker can guess.
func NewRequestID() string {
	var raw [16]byte
	rand.Read(raw[:]) // never fails: it ends the program when the system has no randomness
	var text [32]byte
	hex.Encode(text[:], raw[:])
	return string(text[:])
}

// ValidateRequestID accepts 16 to 128 characters of A–Z a–z 0–9 - _, which every service can store unescaped. A shorter
// id cannot carry 128 random bits, and people who pass "worker-1" as an id must not get each other's locks. Whether the
// characters are random cannot be checked. The error is an *InvalidError and wraps ErrInvalidOption.
func ValidateRequestID(id string) error {
	why := ""
	switch {
	case len(id) < 16:
		why = "it is shorter than 16 characters; use at least 128 random bits, a UUID for example"
	case len(id) > 128:
		why = "it is longer than 128 characters"
	default:
		for i := 0; i < len(id); i++ {
			c := id[i]
			ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
			if !ok {
				why = fmt.Sprintf("byte %d is none of A-Z a-z 0-9 - _", i)
				break
			}
		}
	}
	if why == "" {
		return nil
	}
	return &InvalidError{Kind: ErrInvalidOption, What: "request id", Value: quoteShort(id), Why: why}
}
