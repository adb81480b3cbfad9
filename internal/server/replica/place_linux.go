package replica

import (
	"os"

	"golang.org/x/sys/unix"
)

func placeOf(path string) (place, error) {
	var x unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_INO|unix.STATX_BTIME, &x); err != nil {
		return place{}, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	p := place{Device: unix.Mkdev(x.Dev_major, x.Dev_minor), Inode: x.Ino}
	if x.Mask&unix.STATX_BTIME != 0 {
		p.Born = x.Btime.Sec*1e9 + int64(x.Btime.Nsec)
	}
	return p, nil
}
