// Package pagetest tests the web page of the HTTP gateway in Debian's chromium. It is a separate module, so that no
// program that uses Fencelock has the client of a browser in its go.mod. Without chromium the tests are skipped, unless
// FENCELOCK_REQUIRE=all is set.
package pagetest
