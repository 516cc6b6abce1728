"""Compare torchmm pipelines with PyTorch schedules: overhead, computing and sleeping ranks.

    python benchmarks/pipeline_runtime.py [--quick] [--json FILE] [--cases NAME ...]

    bookkeeping   `pipeline_bookkeeping`: runtime overhead per compute action
    model         `pipeline_model_case`: an image-text model on two ranks
    sleep         `pipeline_sleep_case`: eight ranks whose layers sleep

Image counts are those of real documents (`documents`). Every rank uses one thread. "stock" is
`Schedule1F1B` or `ScheduleInterleaved1F1B` of PyTorch, whichever is faster, with its best split of
the layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from documents import load_documents
from support.cases import pipeline_model_case as model_case
from support.cases import pipeline_sleep_case as sleep_case
from support.harness import Row, run_cases
from support.models import pipeline_bookkeeping as bookkeeping
from support.models.pipeline_model import SEED
from support.ranks import run_ranks


def run_bookkeeping(size: str) -> Iterator[list[Row]]:
    """Measure one rank and two ranks."""
    yield bookkeeping.measure(bookkeeping.REPETITIONS[size])


def run_model(size: str) -> Iterator[list[Row]]:
    """Measure two computing ranks."""
    for setting in model_case.SETTINGS[size]:
        found = run_ranks(model_case.run_rank, model_case.RANKS, setting)
        _describe("model", found)
        print(f"model: the encoder takes {found['tower share']:.0%} of the compute time")
        yield model_case.rows(setting, found)


def run_sleep(size: str) -> Iterator[list[Row]]:
    """Measure eight sleeping ranks."""
    for setting in sleep_case.SETTINGS[size]:
        found = sleep_case.run(setting)
        _describe("sleep", found)
        yield sleep_case.rows(setting, found)


CASES = {"bookkeeping": run_bookkeeping, "model": run_model, "sleep": run_sleep}


def _describe(case: str, found: dict) -> None:
    print(f"{case}: images per microbatch, by step: {found['images']}")
    print(f"{case}: torchmm: {found['choice']}")
    for name, split in found["splits"].items():
        print(f"{case}: stock, {name}: layers per stage {split}")
    print(f"{case}: {found['comparison']}")


def main() -> None:
    """Run the cases, and print and store the rows after each case."""
    conditions = f"documents: {load_documents().source}; seed {SEED}"
    run_cases("Separated pipelines and PyTorch schedules", __doc__, CASES, conditions)


if __name__ == "__main__":
    main()
