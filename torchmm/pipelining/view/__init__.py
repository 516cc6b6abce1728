"""Timeline plots, bubbles by class, traces, and schedules as CSV files."""
