"""Records of what tests check for each model family.

scripts/family_table.py writes the tables of docs/reference/model_tests.md from these records. A
test declares with `proves` what it checks, and of which tiny models. With `--proofs FILE`, pytest
writes a line for each test that passed.

A manually written table is not used: it could differ from what tests check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

Cases = Mapping[str, Mapping[str, Any]]
"""Configs of tiny models by the name that tests are parametrized with."""


def proves(what: str, cases: Cases, **params: Any) -> pytest.MarkDecorator:
    """Return the mark of a test.

    Args:
        what: A column of the table.
        cases: The test checks the case that a parameter names; all cases if no parameter does.
        params: Values that parameters must have for this record.
    """
    return pytest.mark.proves(what, cases, params)


def proved(item: pytest.Item) -> Iterator[dict[str, str]]:
    """Yield the records of `item`, which passed."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    for mark in item.iter_markers("proves"):
        what, cases, required = mark.args
        if any(params.get(name) != value for name, value in required.items()):
            continue
        names = [value for value in params.values() if isinstance(value, str)]
        for case in [name for name in names if name in cases] if names else cases:
            yield {
                "model_type": cases[case]["model_type"],
                "what": what,
                "transformers": transformers.__version__,
            }


def note(item: pytest.Item, file: Path) -> None:
    """Append records to `file`, which several test processes may do at the same time."""
    lines = [json.dumps(proof) + "\n" for proof in proved(item)]
    if lines:
        with file.open("a") as out:
            out.write("".join(lines))
