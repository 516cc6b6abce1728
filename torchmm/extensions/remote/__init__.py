"""Object stores, checkpoint upload and the preprocessing service."""
