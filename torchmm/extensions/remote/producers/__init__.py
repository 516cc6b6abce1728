"""Preprocessing service: data workers request prepared samples from other hosts."""
