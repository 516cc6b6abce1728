"""Fixtures of samples: a tokenizer and a directory with images."""

from data_fixtures import quiet_datasets, read, reader, root, text_spec, tokenizer

__all__ = ["quiet_datasets", "read", "reader", "root", "text_spec", "tokenizer"]
