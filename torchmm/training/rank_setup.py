"""Preparation of ranks before training: measurements, kernels and random numbers."""

from __future__ import annotations

import logging
import os

import torch

from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError
from torchmm.common.log import report_progress
from torchmm.common.processes import set_malloc_retention
from torchmm.common.rng import seed_everything
from torchmm.parallel.attention_kernels import select_kernels
from torchmm.parallel.gather import gather_texts
from torchmm.parallel.health.preflight import check_ranks
from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.resolved_recipe import ResolvedRecipe


@report_progress("measuring the ranks")
def prepare_ranks(run: ResolvedRecipe, mesh: ParallelMesh, logger: logging.Logger) -> None:
    """Measure ranks and their network, select kernels and seed random numbers. Collective."""
    training = run.recipe.training
    check_ranks(mesh, DTYPES[training.dtype], run.recipe.parallel.slow_rank_threshold, logger)
    if mesh.device.type == "cpu":
        set_malloc_retention()
    logger.info(select_kernels(training.attention, mesh.device))
    seed_rank(run, mesh)
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_rank(run: ResolvedRecipe, mesh: ParallelMesh, *step: int) -> None:
    """Seed the random numbers of this rank, optionally for the steps after a checkpoint.

    Ranks of one tensor-parallel group have the same samples and pipeline position. They use
    identical random numbers, because they must have identical dropout masks.
    """
    stream = [mesh.data_parallel_rank]
    if mesh.plan_size > 1:
        stream.append(mesh.plan_rank // mesh.mirror_count)
    seed_everything(run.recipe.training.seed, *stream, *step)


def check_choices_agree(run: ResolvedRecipe, logger: logging.Logger) -> None:
    """Log the values that were selected for "auto". Collective.

    Raises:
        ConfigError: Ranks selected different values.
    """
    data = run.recipe.data
    of_ranks = gather_texts(f'data.reorder = "{data.reorder}", data.balance = "{data.balance}"')
    if len(set(of_ranks)) > 1:
        values = "; ".join(dict.fromkeys(of_ranks))
        raise ConfigError(
            f'data.reorder, data.balance: ranks chose different values for "auto" '
            f"({values}); set both keys"
        )
    if run.data_parallel_size > 1:
        for key, text in run.choices.items():
            logger.info("%s = auto: %s", key, text)
