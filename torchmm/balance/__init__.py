"""Cost model and planners: pure deterministic functions without process groups or recipes."""
