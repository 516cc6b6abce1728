"""Metrics of a step and the trackers that display them. `figures` defines the metrics."""
