package principal

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"math/big"
	"strings"
)

// A token consists of flk_, 256 random bits and a checksum, both in base 62. With the prefix and the checksum, scanners
// can find published tokens without false alarms.
const (
	tokenPrefix = "flk_"
	base62      = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	secretSize  = 43 // digits for 256 bits
	sumSize     = 6  // digits for 32 bits
)

// NewToken returns a random token.
func NewToken() string {
	var secret [32]byte
	rand.Read(secret[:]) // never fails
	text := tokenPrefix + inBase62(new(big.Int).SetBytes(secret[:]), secretSize)
	return text + tokenSum(text)
}

func tokenSum(text string) string {
	return inBase62(big.NewInt(int64(crc32.ChecksumIEEE([]byte(text)))), sumSize)
}

// inBase62 returns n in base 62, with size digits.
func inBase62(n *big.Int, size int) string {
	text := make([]byte, size)
	base, digit := big.NewInt(int64(len(base62))), new(big.Int)
	for i := range text {
		n.DivMod(n, base, digit)
		text[size-1-i] = base62[digit.Int64()]
	}
	return string(text)
}

// ErrNoToken is the error for a text that is not a token, for example because it is mistyped or truncated.
var ErrNoToken = errors.New("it is not a token: want flk_ and 49 letters and digits, of which the last 6 are a " +
	"checksum")

// CheckToken returns ErrNoToken unless NewToken can have returned text.
func CheckToken(text string) error {
	secret, found := strings.CutPrefix(text, tokenPrefix)
	if !found || len(secret) != secretSize+sumSize {
		return ErrNoToken
	}
	for i := range secret {
		if !strings.Contains(base62, secret[i:i+1]) {
			return ErrNoToken
		}
	}
	if body := len(text) - sumSize; text[body:] != tokenSum(text[:body]) {
		return ErrNoToken
	}
	return nil
}

// Hash is the hash of a token, for files. Nobody can compute the token from it.
type Hash [sha256.Size]byte

// hashPrefix begins the text of a Hash.
const hashPrefix = "sha256:"

// HashOf returns the hash of a token. The constant prefix makes it differ from other SHA-256 hashes of the token.
func HashOf(token string) Hash { return sha256.Sum256([]byte("fencelock token\x00" + token)) }

// String returns sha256: and 64 hexadecimal digits.
func (h Hash) String() string { return hashPrefix + hex.EncodeToString(h[:]) }

func parseHash(text string) (h Hash, err error) {
	digits, found := strings.CutPrefix(text, hashPrefix)
	raw, err := hex.DecodeString(digits)
	if !found || err != nil || len(raw) != len(h) {
		return h, fmt.Errorf("want %s and %d hexadecimal digits, as \"fencelock token create\" prints them", hashPrefix,
			2*len(h))
	}
	return Hash(raw), nil
}
