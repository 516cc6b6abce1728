"""Stage layouts and fixed schedules: GPipe, 1F1B, interleaved, zero bubble, separated."""
