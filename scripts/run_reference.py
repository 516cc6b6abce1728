"""Writes docs/reference/metrics.md and exit_codes.md from the code that they describe.

python scripts/run_reference.py
"""

import inspect
from pathlib import Path
from typing import get_args

from torchmm.common import errors
from torchmm.training import ending
from torchmm.training.metrics import METRICS

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/run_reference.py from {source}; do not edit by hand. -->"

_JSON = {int: "integer", float: "number", str: "text", dict: "object"}
"""JSON names of Python types."""

METRICS_PAGE = """\
# metrics.jsonl

{note}

`outputs/NAME/metrics.jsonl` has one JSON object per line and step, written by rank 0 when the step
has ended. A key that does not apply is null. Times are those of the slowest rank. After a crash the
lines of steps that are trained again are replaced, so each step is there once.

```sh
tail -n 1 outputs/mine/metrics.jsonl      # the newest step
python scripts/show_run.py outputs/mine   # medians, best losses, waiting times
```

The group is that of trackers' panels: `time/step_ms` there is `step_ms` here. A bare number has
no unit.

| key | type | unit | group | meaning |
|---|---|---|---|---|
{rows}"""

CODES = """\
# Exit codes

{note}

`train.py` ends with one of these. Under torchrun, whose own exit code is 1 whatever its workers
returned, `outputs/NAME/STATUS.json` has the code instead, with the message and the rank that failed
first.

| code | when | as |
|---:|---|---|
{rows}
In STATUS.json `state` is one of {states}; `exit_code` is null
while a run trains. Schedulers can act on the code: `scripts/launch/slurm.sh` queues a run again
after 75 and, up to `RETRIES` times, after 6; the others need a person
([troubleshooting](../troubleshooting.md)).
"""


def metrics_page() -> str:
    """Return the page of all metrics, in the order of metrics.jsonl."""
    rows = ""
    for name, metric in METRICS.items():
        kind = _JSON[metric.kind] + " or null" * metric.nullable
        rows += f"| `{name}` | {kind} | {metric.unit} | {metric.group} | {metric.description} |\n"
    note = NOTE.format(source="torchmm/training/metrics.py")
    return METRICS_PAGE.format(note=note, rows=rows)


def exit_codes_page() -> str:
    """Every class of errors that ends a run with a code of its own."""
    kinds = [kind for kind in vars(errors).values() if _ends_runs(kind)]
    rows = {errors.EXIT_DONE: ("the run is complete", "")}
    rows[1] = ("anything else: a bug, or an error of the system; a traceback is shown", "")
    for kind in kinds:
        if kind.exit_code != 1:
            told = (inspect.getdoc(kind) or "").partition("\n\n")[0]
            when, name = rows.get(kind.exit_code, ("", ""))
            rows[kind.exit_code] = (
                "; or: ".join(filter(None, (when, " ".join(told.split()).rstrip(".")))),
                ", ".join(filter(None, (name, f"`{kind.__name__}`"))),
            )
    lines = [f"| {code} | {when} | {name} |\n" for code, (when, name) in sorted(rows.items())]
    states = ", ".join(f"`{state}`" for state in get_args(ending.State))
    note = NOTE.format(source="torchmm/common/errors.py")
    return CODES.format(note=note, rows="".join(lines), states=states)


def _ends_runs(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.TorchmmError)


def main() -> None:
    """Writes both pages."""
    for name, text in {"metrics": metrics_page(), "exit_codes": exit_codes_page()}.items():
        (REFERENCE / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"wrote {REFERENCE / name}.md")


if __name__ == "__main__":
    main()
