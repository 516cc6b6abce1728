"""Record metrics and run files, and send them to trackers."""
