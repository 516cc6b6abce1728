"""benchmarks/support/papers."""
