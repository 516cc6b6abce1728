"""Pipelines against torch's own: real wall clock of an image-text model.

    python benchmarks/pipeline_runtime.py [--quick] [--json FILE]

See `pipeline_model_case` for what is compared. Numbers of images per microbatch are those of real
documents (`documents`). Every rank computes with one thread.
"""

from __future__ import annotations

import pipeline_model_case as model_case
import torch
from harness import describe_machine, make_parser, report
from pipeline_model import SEED
from ranks import run_ranks


def main() -> None:
    """Prints the table."""
    arguments = make_parser((__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    machine = describe_machine(torch.device("cpu"))
    print(f"machine: {machine}")
    setting = model_case.QUICK if arguments.quick else model_case.FULL
    found = run_ranks(model_case.run_rank, model_case.RANKS, setting)
    print(f"documents: {found['source']}; seed {SEED}")
    print(f"images per microbatch, by step: {found['images']}")
    print(f"tower's share of the computing time: {found['tower share']:.0%}")
    print(f"ours: {found['choice']}; stock: layers per stage {found['splits']}")
    report("Pipelines against torch's schedules", model_case.rows(setting, found), arguments.json)


if __name__ == "__main__":
    main()
