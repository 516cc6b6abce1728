"""Detection of slow, lost and hanging ranks and of non-finite numbers, on all ranks."""
