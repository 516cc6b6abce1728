"""Boxes and points in the text of samples."""
