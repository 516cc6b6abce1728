"""Plan of every step: one rank of a pipeline creates and distributes it."""
