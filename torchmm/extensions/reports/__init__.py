"""Write the run page, data inspection, step timelines and local trackers."""
