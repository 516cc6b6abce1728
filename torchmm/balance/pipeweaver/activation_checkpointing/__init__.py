"""PipeWeaver: memory tuning that selects layers to save, recompute or offload."""
