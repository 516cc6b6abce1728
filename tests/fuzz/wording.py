"""Messages without what is particular to a recipe: numbers, names, paths."""

from __future__ import annotations

import re
from typing import NamedTuple

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


class Refusal(NamedTuple):
    """A message of a `ConfigError`, taken apart."""

    key: str
    why: str
    remedy: str


def generalized(text: str) -> str:
    """The message as other recipes would get it."""
    for pattern, new in _REPLACED:
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    return text


def refusal(problem: str) -> Refusal:
    """Key, what is wrong, and what to do about it."""
    text = generalized(problem)
    found = re.match(
        r"(?P<key>\[?[\w.\[\]]+\]?(?: \w+)?)(?: = (?P<value>.*?))?: (?P<text>.*)", text, re.S
    )
    if found is None:
        found = re.match(r"(?P<key>\[[\w.]+\] \w+)(?P<value>)(?P<text>.*)", text, re.S)
    if found is None:
        return Refusal("", text, "")
    why, _, remedy = found["text"].removeprefix(" = N").strip().rpartition("; ")
    key = re.sub(r"\[(\w[\w.]*)\] (\w+)", r"\1.\2", found["key"]).strip("[]")
    return Refusal(key, *((why, remedy) if why else (remedy, "")))


def names_a_key(problem: str) -> bool:
    """Whether a message says which key (or section) of a recipe is meant."""
    sections = (
        "model|freeze|adapters|data|parallel|training|activation_checkpoint|simulation|compile"
        "|float8"
    )
    return re.search(rf"(?:\[|\b)(?:{sections})(?:\]|\.\w|: )", problem) is not None
