"""PipeWeaver: search for the order of the tasks of a step (section 6)."""
