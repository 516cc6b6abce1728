"""Fixtures of data tests."""

from data_fixtures import quiet_datasets

__all__ = ["quiet_datasets"]
