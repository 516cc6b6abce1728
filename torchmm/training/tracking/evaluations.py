"""Scores of exports: lines of `evaluations.jsonl` in a run directory.

They are not in metrics.jsonl, which only the run itself writes, with one line per step. Other
processes may add evaluations of any export at any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchmm.common.files import add_path_to_os_errors

RESULTS = "evaluations.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """Scores of one export.

    Attributes:
        export: Directory of the export.
        step: Step after which the export was written. None if it is unknown.
        scores: Scores by "SOURCE/SCORE" or "TASK/METRIC".
        samples: Number of samples by source or task.
    """

    export: str
    step: int | None
    scores: Mapping[str, float]
    samples: Mapping[str, int] = field(default_factory=dict)


def append_evaluation(run_dir: Path, evaluation: Evaluation) -> None:
    """Append a line to evaluations.jsonl.

    Raises:
        OSError: The file cannot be written. The message has its path.
    """
    line = json.dumps(asdict(evaluation)) + "\n"
    path = run_dir / RESULTS
    with add_path_to_os_errors(path, len(line)), path.open("a", encoding="utf-8") as file:
        file.write(line)


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return all evaluations of a run, in order. Raise ValueError if a line is damaged."""
    path = run_dir / RESULTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [parse_evaluation(line) for line in lines]


def parse_evaluation(line: str) -> Evaluation:
    """Return the evaluation in a line of evaluations.jsonl.

    Raises:
        ValueError: The line has other keys or types.
    """
    try:
        evaluation = Evaluation(**json.loads(line))
        scores = {name: float(value) for name, value in evaluation.scores.items()}
        return Evaluation(str(evaluation.export), evaluation.step, scores, dict(evaluation.samples))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a line of {RESULTS} is not a valid evaluation: {error!r}") from None
