package kit

// URLs of lock services, with one vocabulary for all drivers. They are parsed by hand and not with net/url, which
// refuses several addresses in one URL; its functions parse the parts. Errors suggest the right form if it is known,
// and never show the password, even if it has spilled into another part of the URL.

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/tlsfiles"
)

// Syntax describes the URLs of a driver:
//
//	scheme://[user:password@]host[:port][,host[:port]…][/path][?option=value&…]
//
// Every URL has the options ca, cert and key (files in PEM form: the authorities to trust, and the client's certificate
// with its key), server-name (the name to expect in the servers' certificates) and timeout (for connecting and the
// first look at the service, such as 5s). One of the first four selects TLS, as does a scheme of Secure. With User
// there is password-file, too: a file with the password, without its final newline, in place of the password in the
// URL. Replaced files are reread for the next connection. An unknown option is an error, so that a misspelling is not
// silently ignored.
//
//	var syntax = kit.Syntax{
//		Driver: "myservice", Schemes: []string{"myservice"}, Secure: []string{"myservices"}, Port: "7420",
//		Options: []string{"prefix"}, Timeout: 5 * time.Second,
//	}
type Syntax struct {
	// Driver stands in errors.
	Driver string
	// Schemes are the schemes without TLS, and Secure the schemes that select it.
	Schemes []string
	Secure  []string
	// Port is the default port.
	Port string
	// User and Path: a URL may name a user, and may have a path.
	User bool
	Path bool
	// Options are the options of the driver, beside the common ones.
	Options []string
	// Timeout is URL.Timeout where the option is not given.
	Timeout time.Duration
}

// URL is a parsed URL. Options has the options of the driver and the common ones; Duration, Int and Bool read them.
type URL struct {
	Scheme string
	// Addresses are host:port, at least one, in the order of the URL.
	Addresses []string
	// User and Password are unescaped, and empty if absent. Password is the password of the URL, or of the file when
	// the URL was parsed: see CurrentPassword.
	User     string
	Password string
	// Path is unescaped, without the slashes around it.
	Path    string
	Timeout time.Duration
	// TLS is nil for a connection without it. A driver dials with the result of DialTLS for it.
	TLS *tls.Config
	// Options has each given option, once.
	Options url.Values

	// passwords reads the file of the password; nil without one.
	passwords *tlsfiles.Files[string]
	// driver and raw are for Invalid.
	driver, raw string
}

// CurrentPassword returns the password for a new connection: the content of the password file as it is now, or as it
// was at most a second ago. While the file cannot be read, its last content is in use. It is safe for concurrent use.
func (u *URL) CurrentPassword() string {
	if u.passwords == nil {
		return u.Password
	}
	return u.passwords.Current()
}

// commonOptions are the options of every driver; see Syntax.
var commonOptions = []string{"ca", "cert", "key", "server-name", "timeout"}

// ParseURL reads a URL. It opens the files that the TLS options name, and does not dial. Its error is as from
// URL.Invalid.
//
//	some://a,b:2379,[::1]/path?timeout=2s     three addresses; the first and the last have the default port
//	some://[::1]:2379?ca=/etc/some/ca.pem     TLS, because of the option
//	some://a?timout=2s                        an error that lists the valid options
//	some://ann:s/cret@a                       an error that says to write %2F, and does not show the password
func (s Syntax) ParseURL(rawURL string) (*URL, error) {
	u := &URL{driver: s.Driver, raw: rawURL, Timeout: s.Timeout}
	if err := u.parse(s); err != nil {
		return nil, u.Invalid(err)
	}
	return u, nil
}

// Invalid returns the error for a URL that the driver cannot open: a *backend.InvalidError in a *backend.CallError,
// without the password. A driver calls it for invalid values of its options. The error has the text of why, but not
// its chain.
func (u *URL) Invalid(why error) error {
	return &backend.CallError{Driver: u.driver, Call: "open", Err: &backend.InvalidError{
		Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(u.raw), Why: why.Error(),
	}}
}

// parse fills u in from u.raw. A user name or password may contain characters with a meaning in a URL, if they are
// escaped. If they are not, the parts come out wrong without an error: so parse refuses a misplaced @, and any #,
// before anything is shown.
func (u *URL) parse(s Syntax) (err error) {
	scheme, rest, ok := strings.Cut(u.raw, "://")
	if u.Scheme = scheme; !ok || !slices.Contains(s.Schemes, scheme) && !slices.Contains(s.Secure, scheme) {
		return fmt.Errorf("its scheme is not one of %s", strings.Join(slices.Concat(s.Schemes, s.Secure), ", "))
	}
	if strings.Contains(rest, "#") {
		return errors.New("it contains #; in a password, write %23")
	}
	rest, query, _ := strings.Cut(rest, "?")
	hosts, path, _ := strings.Cut(rest, "/")
	if strings.Contains(path, "@") || strings.Contains(query, "@") && !strings.Contains(hosts, "@") {
		return errors.New("it contains / or ? before the @; in a password, write %2F and %3F") // and do not show it
	}
	if at := strings.LastIndexByte(hosts, '@'); at >= 0 {
		if !s.User {
			return errors.New("it has a user; this service identifies clients by their certificates")
		}
		user, password, _ := strings.Cut(hosts[:at], ":")
		hosts = hosts[at+1:]
		if u.User, err = url.PathUnescape(user); err == nil {
			u.Password, err = url.PathUnescape(password)
		}
		if err != nil {
			return errors.New("its user or password is malformed; for %, write %25")
		}
	}
	if u.Path, err = url.PathUnescape(strings.Trim(path, "/")); err != nil {
		return errors.New("its path is malformed")
	}
	if u.Path != "" && !s.Path {
		return errors.New("it has a path; URLs of this service have no path")
	}
	for host := range strings.SplitSeq(hosts, ",") {
		address, err := addressOf(host, s.Port)
		if err != nil {
			return fmt.Errorf("%w: write %s://localhost:%s for a server on this machine", err, scheme, s.Port)
		}
		u.Addresses = append(u.Addresses, address)
	}
	return u.readOptions(query, s)
}

// addressOf returns host:port. An IPv6 address needs brackets, since its colons would otherwise look like ports.
func addressOf(host, defaultPort string) (string, error) {
	if host == "" {
		return "", errors.New("it has no host")
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = host, defaultPort
		if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") {
			name = host[1 : len(host)-1]
		} else if strings.Count(host, ":") > 1 {
			return "", errors.New("its host has too many colons: put an IPv6 address in brackets")
		}
	}
	switch n, err := strconv.ParseUint(port, 10, 16); {
	case name == "":
		return "", errors.New("it has no host before the port")
	case strings.ContainsAny(name, " %[]\\\"") || strings.Contains(name, ":") && net.ParseIP(name) == nil:
		return "", errors.New("its host is invalid")
	case err != nil || n == 0:
		return "", errors.New("its port is not a number from 1 to 65535")
	}
	return net.JoinHostPort(name, port), nil
}

// readOptions refuses unknown and repeated options, and reads the options that all drivers share.
func (u *URL) readOptions(query string, s Syntax) (err error) {
	if u.Options, err = url.ParseQuery(query); err != nil {
		return errors.New("its options are malformed: write option=value, separated by &")
	}
	known := slices.Concat(s.Options, commonOptions)
	if s.User {
		known = append(known, "password-file")
	}
	for name, values := range u.Options {
		if !slices.Contains(known, name) {
			return fmt.Errorf("it has the unknown option %q; the options are %s", name, strings.Join(known, ", "))
		}
		if len(values) != 1 {
			return fmt.Errorf("option %s is given %d times", name, len(values))
		}
	}
	if u.Options.Has("timeout") {
		if u.Timeout, err = u.Duration("timeout"); err != nil {
			return err
		}
	}
	secure := slices.Contains(s.Secure, u.Scheme)
	for _, name := range []string{"ca", "cert", "key", "server-name"} {
		secure = secure || u.Options.Has(name)
	}
	if secure {
		if u.TLS, err = rotatingTLS(u.Options); err != nil {
			return err
		}
	}
	if u.Options.Has("password-file") {
		err = u.readPassword(u.Options.Get("password-file"))
	}
	return err
}

// readPassword reads the password from a file, and again when the file is replaced.
func (u *URL) readPassword(path string) error {
	if u.Password != "" {
		return errors.New("it has a password and a password-file: give one of them")
	}
	read := func() (string, error) { return ReadPassword("password-file", path) }
	files, err := tlsfiles.Read(read, func(string, error) {}, path)
	if err != nil {
		return err
	}
	u.passwords, u.Password = files, files.Current()
	return nil
}

// ReadPassword reads the file that an option names: a password, and at most one newline. Its error names the option.
func ReadPassword(option, path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("%s: %w", option, err)
	}
	password := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r")
	if password == "" {
		return "", fmt.Errorf("%s: %s is empty", option, path)
	}
	return password, nil
}

// Duration reads a given option, such as 5s or 250ms. It has to be positive.
func (u *URL) Duration(name string) (time.Duration, error) {
	d, err := time.ParseDuration(u.Options.Get(name))
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("option %s is %q; want a positive duration such as 5s", name, u.Options.Get(name))
	}
	return d, nil
}

// Int reads an option that is a whole number between two bounds, both included; 0 if it is not given, even if 0 is
// out of bounds.
func (u *URL) Int(name string, least, most int) (int, error) {
	if !u.Options.Has(name) {
		return 0, nil
	}
	text := u.Options.Get(name)
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("option %s is %q; want a number from %d to %d", name, text, least, most)
	}
	return n, nil
}

// Bool reads an option that is "true" or "false"; false if it is not given.
func (u *URL) Bool(name string) (bool, error) {
	switch text := u.Options.Get(name); {
	case !u.Options.Has(name), text == "false":
		return false, nil
	case text == "true":
		return true, nil
	default:
		return false, fmt.Errorf("option %s is %q; want true or false", name, text)
	}
}

// DialTLS returns the configuration for one connection. For the TLS of a URL it is made from the current files, or
// from their last valid contents if they are invalid now. For any other configuration it is the result of
// GetConfigForClient, or without one the configuration itself. The caller must not change it.
func DialTLS(config *tls.Config) (*tls.Config, error) {
	if config == nil || config.GetConfigForClient == nil {
		return config, nil
	}
	now, err := config.GetConfigForClient(&tls.ClientHelloInfo{})
	if err != nil || now == nil {
		return config, err
	}
	return now, nil
}

// rotatingTLS is tlsOf for files that may be replaced: DialTLS then rereads them.
func rotatingTLS(options url.Values) (*tls.Config, error) {
	var paths []string
	for _, name := range []string{"ca", "cert", "key"} {
		if path := options.Get(name); path != "" {
			paths = append(paths, path)
		}
	}
	read := func() (*tls.Config, error) { return tlsOf(options) }
	files, err := tlsfiles.Read(read, func(*tls.Config, error) {}, paths...)
	if err != nil {
		return nil, err
	}
	config := files.Current().Clone()
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return files.Current(), nil }
	return config, nil
}

// tlsOf returns the settings of the options: by default the system's authorities and the dialled name. There is no
// option to skip the verification. TLS 1.2 is the least version.
func tlsOf(options url.Values) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: options.Get("server-name")}
	if file := options.Get("ca"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca: %s contains no PEM certificate", file)
		}
	}
	cert, key := options.Get("cert"), options.Get("key")
	if (cert == "") != (key == "") {
		return nil, errors.New("cert and key belong together")
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("cert: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
