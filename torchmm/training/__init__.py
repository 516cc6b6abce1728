"""A run with process groups: build, plan, train, validate, record and save."""
