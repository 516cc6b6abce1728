"""Run the examples on the cards of exports, with the packages that the cards require.

python with_cards.py JOBS ANSWERS    (both JSON; one process for all cards)
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    """Run all examples. Errors are part of the answers."""
    answers: dict[str, dict] = {}
    for job in json.loads(Path(sys.argv[1]).read_text()):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(job["code"], {})
            answers[job["family"]] = {"text": printed.getvalue().removesuffix("\n")}
        except Exception as error:  # of another program; the test reports it
            answers[job["family"]] = {"error": f"{type(error).__name__}: {error}"}
    versions = {"transformers": version("transformers")}
    Path(sys.argv[2]).write_text(json.dumps({"versions": versions, "answers": {"cards": answers}}))


if __name__ == "__main__":
    main()
