"""Fixtures of tests with tiny models."""

from word_tokenizer import tokenizer

__all__ = ["tokenizer"]
