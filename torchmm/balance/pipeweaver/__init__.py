"""PipeWeaver: a schedule search for every batch, and memory-limited recomputation."""
