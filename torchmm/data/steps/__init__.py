"""Sample order, packing and assignment of sequences to steps. Uses sizes only."""
