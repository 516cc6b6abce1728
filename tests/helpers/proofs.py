"""What tests prove of each family of models, noted while they run.

scripts/family_table.py writes the tables of docs/reference/model_tests.md from it.

A test says with `proves` what its passing proves, and of which tiny models. With `--proofs FILE`,
pytest writes a line for each that passed; `scripts/family_table.py` makes a table of the lines.
Rejected: a table by hand, which says what somebody once meant to test.
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
    """Marks a test.

    Args:
        what: a column of the table.
        cases: the test is about the one that a parameter names; about all of them if none does.
        params: values that parameters must have for this to be proved.
    """
    return pytest.mark.proves(what, cases, params)


def proved(item: pytest.Item) -> Iterator[dict[str, str]]:
    """What `item` has proved by passing."""
    given = getattr(item, "callspec", None)
    params = {} if given is None else given.params
    for mark in item.iter_markers("proves"):
        what, cases, wanted = mark.args
        if any(params.get(name) != value for name, value in wanted.items()):
            continue
        names = [value for value in params.values() if isinstance(value, str)]
        for case in [name for name in names if name in cases] if names else cases:
            yield {
                "model_type": cases[case]["model_type"],
                "what": what,
                "transformers": transformers.__version__,
            }


def note(item: pytest.Item, file: Path) -> None:
    """Adds lines to `file`; several test processes may do so at a time."""
    lines = [json.dumps(proof) + "\n" for proof in proved(item)]
    if lines:
        with file.open("a") as out:
            out.write("".join(lines))
