"""A training step as data: plan representation, schedules, validation, runtime, plots."""
