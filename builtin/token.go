package builtin

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/principal"
)

// tokenFile is the path of a file with a token. It implements credentials.PerRPCCredentials.
type tokenFile string

// read returns the token that the file has now.
func (f tokenFile) read() (string, error) {
	text, err := os.ReadFile(string(f))
	token := strings.TrimSpace(string(text))
	if err == nil {
		if err = principal.CheckToken(token); err != nil {
			err = fmt.Errorf("%s: %w", string(f), err)
		}
	}
	return token, err
}

// GetRequestMetadata returns the token for gRPC to send. gRPC returns its errors as codes.Unauthenticated.
func (f tokenFile) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := f.read()
	if err != nil {
		return nil, err
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (f tokenFile) RequireTransportSecurity() bool { return true }

// errToken: a server refuses the token.
var errToken = fmt.Errorf("%w: no valid token", backend.ErrDenied)

// deniedToken adds errToken to an error of a server that refuses the token. Other errors stay as they are.
func deniedToken(err error) error {
	if status.Code(err) == codes.Unauthenticated {
		return fmt.Errorf("%w: %w", errToken, err)
	}
	return err
}

// checkToken returns an error if Options.TokenFile cannot be used.
func checkToken(o *Options) error {
	if o = cmp.Or(o, &Options{}); o.TokenFile == "" {
		return nil
	}
	if o.TLS == nil {
		return kit.InvalidOption("token file", o.TokenFile, "want TLS as well: in the clear others read the token")
	}
	if _, err := tokenFile(o.TokenFile).read(); err != nil {
		return kit.InvalidOption("token file", o.TokenFile, err.Error())
	}
	return nil
}
