"""Generate text token by token with a cache, in every parallelism config."""
