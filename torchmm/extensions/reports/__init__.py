"""Run page, data inspection, step timelines and local trackers."""
