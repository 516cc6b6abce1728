"""Runtime that executes the actions of one rank, independent of the schedule."""
