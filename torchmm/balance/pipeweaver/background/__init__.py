"""Planning of the next step in a separate process (PipeWeaver section 7.1)."""
