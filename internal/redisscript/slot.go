package redisscript

// This file computes the slot of a name in a Redis Cluster, as the cluster specification defines it. The slot is the
// index into the table of lines of package redis; go-redis has the same function in an internal package.

import "strings"

// Slots is the number of slots of a cluster.
const Slots = 16384

// Slot returns the slot of the keys of a lock: CRC16 (XMODEM) of what stands between the braces.
func Slot(lock string) int {
	if _, tag, ok := strings.Cut(lock, "{"); ok {
		if tag, _, ok := strings.Cut(tag, "}"); ok && tag != "" {
			lock = tag
		}
	}
	crc := uint16(0)
	for i := range len(lock) {
		crc ^= uint16(lock[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc) % Slots
}
