"""Search for parallel sizes: candidates, bounds and simulation."""
