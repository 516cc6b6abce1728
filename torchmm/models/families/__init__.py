"""Adapters for model families, with one table for each type of module."""
