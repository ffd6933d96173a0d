"""From engine events to what a client reads: detokenising, stop strings, choices, and the bridge between threads."""
