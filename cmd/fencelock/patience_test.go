package main

import "time"

// patience bounds every wait for something that must happen.
const patience = time.Minute
