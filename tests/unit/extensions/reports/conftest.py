"""Fixtures of data tests."""

from data_fixtures import quiet_datasets, text_spec, tokenizer

__all__ = ["quiet_datasets", "text_spec", "tokenizer"]
