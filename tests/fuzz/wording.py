"""Error messages of recipes: placeholders for numbers, names and paths."""

from __future__ import annotations

import re

_MODULES = r"(?:vision|second|audio|generator|llm)"
_REPLACED = (
    (r"^\S*recipe\.toml: ", ""),
    (r"/[\w./-]+", "PATH"),
    (r"0x[0-9a-f]+", "N"),
    (rf"\b(encoders|parallel|simulation\.images)\.{_MODULES}\b", r"\1.NAME"),
    (rf"(?<![\w.\"]){_MODULES}(?=( has\b| \(| \d|\.connector|, |$))", "NAME"),
    (r"\brank \d+\b", "rank N"),
    (r"(?<!to )(?<!be )(?<! > )(?<![\w.-])-?\d+(?:\.\d+)?(?:e-?\d+)?\b", "N"),
    (r"NAME \([^)]*\)(?:, NAME \([^)]*\))*", "NAME (SIZES), ..."),
    (rf"'{_MODULES}'", "NAME"),
    (r"\bN(?:, N)+\b", "N, ..."),
    (r"N(?: and N)+", "N, ..."),
    (r"\[[^\]]*'[^\]]*\]", "[...]"),
)


def generalized(text: str) -> str:
    """Return a message with placeholders for numbers, names and paths."""
    for pattern, new in _REPLACED:
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    return text


def names_a_key(problem: str) -> bool:
    """Return True if a message names a key or a section of a recipe."""
    sections = (
        "model|freeze|adapters|data|parallel|training|activation_checkpoint|simulation|compile"
        "|float8|quantization"
    )
    return re.search(rf"(?:\[|\b)(?:{sections})(?:\]|\.\w|: )", problem) is not None
