"""benchmarks/support/cases."""
