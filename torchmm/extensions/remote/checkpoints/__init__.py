"""Checkpoints in object stores: upload, download and removal."""
