"""Validation of plans: missing tasks, mismatched messages, deadlocks, memory."""
