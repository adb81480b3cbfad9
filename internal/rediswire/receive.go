package rediswire

// This file reads the protocol (RESP2): the five types that commands of a lock are answered with. What comes is not
// trusted, as an address may lead to anything: lengths are bounded before memory is taken for them. An answer that
// breaks the bounds ends the connection, because nothing behind it can be told from it.

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/fencelock/fencelock/internal/redisconn"
)

// Bounds of an answer: far more than the script ever gives, and little enough to survive a server that is none.
const (
	// maxText bounds one text, in bytes.
	maxText = 64 << 20
	// maxItems bounds one list.
	maxItems = 1 << 20
	// maxDepth bounds lists in lists; the script answers with two.
	maxDepth = 3
)

// errProtocol is the error of a connection to something that is no Redis. What was sent there counts as sent.
var errProtocol = errors.New("the server does not speak the Redis protocol")

// receive reads one answer: an int64, a string, nil, or a []any of these. An error that the server answers is an
// answer, of type redisconn.ServerError; err is the connection's.
func receive(in *bufio.Reader, depth int) (answer any, err error) {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return nil, err
	}
	// The shortest line has its type and the two characters at its end.
	if len(line) < 3 || line[len(line)-2] != '\r' {
		return nil, fmt.Errorf("%w: %q", errProtocol, line)
	}
	kind, rest := line[0], line[1:len(line)-2]
	switch kind {
	case '+':
		// The answer to every SET that was granted, without new memory.
		if string(rest) == "OK" {
			return "OK", nil // without new memory
		}
		return string(rest), nil
	case '-':
		return redisconn.ServerError(rest), nil
	}
	n, err := strconv.ParseInt(string(rest), 10, 64)
	switch {
	case err != nil:
	case kind == ':':
		return n, nil
	case (kind == '$' || kind == '*') && n == -1:
		return nil, nil
	case kind == '$' && n >= 0 && n <= maxText:
		text := make([]byte, n+2)
		_, err := io.ReadFull(in, text)
		return string(text[:n]), err
	case kind == '*' && n >= 0 && n <= maxItems && depth > 0:
		// The server's word for the length is not believed before the items come.
		list := make([]any, 0, min(n, 128))
		for range n {
			item, err := receive(in, depth-1)
			if err != nil {
				return nil, err
			}
			list = append(list, item)
		}
		return list, nil
	}
	return nil, fmt.Errorf("%w: %q", errProtocol, line)
}
