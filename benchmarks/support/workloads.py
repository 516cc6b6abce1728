"""Models with their data and clusters, for comparisons of parallelism methods.

The recipes of the papers' models are in recipes/papers, those of other models in recipes/zoo and
benchmarks/support/recipes. Each recipe has the statistics of its sequences in [simulation].
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.harness import append_record, read_records
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

ROOT = Path(__file__).parents[2]


class Workload(NamedTuple):
    """A model with its data on a cluster.

    Attributes:
        recipe: Path of the recipe without suffix.
        gpus: Number of GPUs.
        batch: Sequences per step; None: as in the recipe.
    """

    recipe: str
    gpus: int
    batch: int | None = None

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return Path(self.recipe).name

    @property
    def title(self) -> str:
        """Model, number of GPUs and sequences per step."""
        sequences = "" if self.batch is None else f", {self.batch} sequences"
        return f"{self.name}, {self.gpus} GPUs{sequences}"

    def load(self, *overrides: str) -> Recipe:
        """Return the recipe, with `USABLE_MEMORY_FRACTION` as the memory limit of plans.

        Args:
            overrides: Further arguments, as on the command line.
        """
        changes = [f"--activation_checkpoint.memory_limit={USABLE_MEMORY_FRACTION:.0%}", *overrides]
        if self.batch is not None:
            changes.append(f"--training.global_batch_size={self.batch}")
        return load_recipe(ROOT / f"{self.recipe}.toml", changes).recipe


PAPERS = (
    Workload("recipes/papers/pipeweaver_vlm_s", 8),
    Workload("recipes/papers/pipeweaver_vlm_s", 16),
    Workload("recipes/papers/pipeweaver_vlm_s", 64, 128),
    Workload("recipes/papers/pipeweaver_vlm_m", 32),
    Workload("recipes/papers/pipeweaver_vlm_l", 64),
    Workload("recipes/papers/pipeweaver_t2v_s", 16),
    Workload("recipes/papers/optimus_model_a", 64),
    Workload("recipes/papers/optimus_model_d", 512),
    Workload("recipes/papers/optimus_vit22b_gpt175b", 1536),
    Workload("recipes/papers/optimus_vit22b_gpt175b", 3072),
    Workload("recipes/papers/disttrain_mllm_9b", 64, 128),
    Workload("recipes/papers/disttrain_mllm_15b", 64, 128),
    Workload("recipes/papers/disttrain_mllm_72b", 160, 64),
    Workload("recipes/papers/disttrain_mllm_72b", 1280, 1920),
)
MODERN = (
    Workload("recipes/zoo/qwen3_vl_8b", 16),
    Workload("recipes/zoo/qwen3_vl_8b", 64),
    Workload("recipes/zoo/qwen3_vl_30b_a3b", 32),
    Workload("recipes/zoo/qwen3_vl_30b_a3b", 256, 512),
    Workload("benchmarks/support/recipes/qwen2_5_vl_72b", 128),
    Workload("recipes/zoo/internvit_qwen2_5_7b", 16),
    Workload("benchmarks/support/recipes/internvl3_38b", 64),
    Workload("recipes/zoo/siglip2_qwen3_8b", 64),
    Workload("recipes/zoo/omni_qwen3_8b", 32),
    Workload("recipes/zoo/qwen3_omni_30b_a3b", 32),
    Workload("recipes/zoo/llava_1_5_7b", 16),
    Workload("recipes/zoo/qwen3_vl_8b_long", 16),
    Workload("benchmarks/support/recipes/qwen3_vl_8b_video", 64),
)
WORKLOADS = (*PAPERS, *MODERN)

COMPARED = tuple(
    each
    for each in WORKLOADS
    if each.title
    in (
        "pipeweaver_vlm_s, 16 GPUs",
        "pipeweaver_vlm_m, 32 GPUs",
        "pipeweaver_vlm_l, 64 GPUs",
        "pipeweaver_t2v_s, 16 GPUs",
        "optimus_model_a, 64 GPUs",
        "optimus_model_d, 512 GPUs",
        "disttrain_mllm_9b, 64 GPUs, 128 sequences",
        "disttrain_mllm_72b, 160 GPUs, 64 sequences",
        "qwen3_vl_8b, 64 GPUs",
        "qwen3_vl_30b_a3b, 32 GPUs",
        "omni_qwen3_8b, 32 GPUs",
        "qwen3_vl_8b_long, 16 GPUs",
    )
)
"""Workloads on which all methods are compared: every model family, within half an hour."""

QUICK = (Workload("recipes/papers/pipeweaver_vlm_s", 16, 4),)
"""Workloads of `--quick`."""


def add_options(parser: ArgumentParser, budget_s: float) -> None:
    """Add the options of benchmarks that run in pieces, workload by workload.

    Args:
        parser: Parser with the options of all benchmarks.
        budget_s: Default time limit of the planner in seconds.
    """
    add = parser.add_argument
    add("--cases", nargs="*", metavar="RECIPE", help="only workloads of these recipes")
    add("--gpus", nargs="*", type=int, metavar="N", help="only workloads on these numbers of GPUs")
    add(
        "--budget",
        type=float,
        default=budget_s,
        metavar="SECONDS",
        help="time limit of the planner for a workload (default: %(default)s)",
    )
    add(
        "--rows",
        type=Path,
        metavar="FILE",
        help="append finished workloads to FILE and skip those in it",
    )
    add("--report", action="store_true", help="only print the tables of --rows")
    add("--page", type=Path, metavar="FILE", help="Markdown page whose table is replaced")


def select_workloads(
    arguments: Namespace, workloads: tuple[Workload, ...]
) -> tuple[tuple[Workload, ...], float]:
    """Return the workloads that the options select, and the time limit of the planner in seconds.

    Args:
        arguments: Parsed options.
        workloads: Workloads to select from. `--quick` limits the planner to 4 s.
    """
    if arguments.cases:
        workloads = tuple(each for each in workloads if each.name in arguments.cases)
    if arguments.gpus:
        workloads = tuple(each for each in workloads if each.gpus in arguments.gpus)
    return workloads, min(arguments.budget, 4.0) if arguments.quick else arguments.budget


def measured_records(
    arguments: Namespace,
    workloads: Sequence[Workload],
    measure: Callable[[Workload], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the records of the workloads, after measuring those that `--rows` lacks.

    Args:
        arguments: Parsed options. With `--report`, nothing is measured.
        workloads: Selected workloads.
        measure: Function that returns the record of a workload.
    """
    records = {record["workload"]: record for record in read_records(arguments.rows)}
    for workload in () if arguments.report else workloads:
        if workload.title in records:
            continue
        record = records[workload.title] = measure(workload)
        if arguments.rows is not None:
            append_record(record, arguments.rows)
        print(f"{workload.title}: {json.dumps(record)}", flush=True)
    return [records[each.title] for each in workloads if each.title in records]
