"""Sizes of all samples of a source, measured once and stored in files."""
