"""benchmarks/support/models."""
