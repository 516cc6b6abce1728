"""Samples to packed microbatches, in an order that does not depend on the number of ranks."""
