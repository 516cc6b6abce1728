"""Build the components of a run: mesh, records, data, model, optimizer, loader and planner.

The components are built in this order. The model is parallelized on the meta device before memory
is allocated, and the checkpoint determines the position in the data. `torchmm.training.trainer`
restores the random state last.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from torchmm.common.dtypes import DTYPES
from torchmm.common.files import replace_atomically
from torchmm.common.log import make_console, report_progress, setup_logging
from torchmm.data.shared_reader import ReaderAddress
from torchmm.data.tokenizer import describe_untrained_tokens
from torchmm.models.multimodal import MultimodalModel, module_of
from torchmm.parallel.mesh import ParallelMesh, build_mesh, build_units
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.planning.summary import run_summary
from torchmm.recipe.read import dump_recipe
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.load import RestoredRun
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.components import RunComponents
from torchmm.training.console import print_summary
from torchmm.training.data_build import build_arrangements, build_data, log_data, open_data
from torchmm.training.model_build import ModelStages, materialize_stages, set_training_losses
from torchmm.training.optim import build_optimizer, describe_schedule_change, frozen_token_rows
from torchmm.training.optimizers.weight_average import WeightAverage
from torchmm.training.planners.registry import build_planner
from torchmm.training.rank_setup import check_choices_agree, prepare_ranks, seed_rank
from torchmm.training.shutdown import Status, write_status
from torchmm.training.tracking.recorder import MetricsRecorder


def build_run(
    run: ResolvedRecipe,
    run_dir: Path,
    device: torch.device,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    model_stages: ModelStages,
    directory: CheckpointDirectory | None = None,
    streams: ReaderAddress | None = None,
) -> RunComponents:
    """Build the components of a run and initialize the model. Collective over all ranks.

    Args:
        run: Resolved recipe.
        run_dir: Directory of the run.
        device: Device of this rank.
        model: Complete model on the meta device (`build_meta_model`).
        tokenizer: Tokenizer of the model.
        model_stages: Result of `choose_model_stages`.
        directory: Directory of the checkpoints, if rank 0 may have claimed it already.
        streams: Process that reads the streams of this host. If None, every rank reads them.

    Raises:
        ConfigError, DataError, CheckpointError: A component of the run cannot be built.
    """
    recipe = run.recipe
    console = make_console()
    mesh = build_run_mesh(run, device)
    logger = setup_logging(run_dir, mesh.rank, console)
    # The directory is claimed first, so that files of another active run are not overwritten.
    checkpoints = open_checkpoints(run, run_dir, mesh, logger, directory)
    prepare_ranks(run, mesh, logger)
    check_choices_agree(run, logger)
    if mesh.rank == 0:
        write_status(run_dir, Status("running", 0, 0))  # replaces the status of an earlier run
        replace_atomically(run_dir / "recipe.toml", dump_recipe(recipe).encode())
        print_summary(console, recipe.name, run_summary(run, model, device.type))
        learns = model.llm.embedding.weight.requires_grad
        if warning := describe_untrained_tokens(recipe.model, tokenizer, trains_embeddings=learns):
            logger.warning(warning)
    # Data are opened before weights, so that missing files are reported quickly.
    samples, held_out = open_data(run, model, tokenizer, streams)
    if mesh.rank == 0:
        log_data(run, model, samples, logger)
    pipeline, compilation = materialize_stages(run, model, mesh, model_stages)
    set_training_losses(model, run)
    optimizer = build_optimizer(
        model,
        module_of,
        recipe.optimizer,
        model.tied_replica_parameters() | {p for p, _ in frozen_token_rows(model)},
        model.layer_matrices(),
        DTYPES[recipe.training.dtype],
    )
    decay = recipe.training.ema_decay
    average = None if decay is None else WeightAverage(model, decay)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    restored = checkpoints.resume(model, optimizer, restarted, average)
    step = _log_resume(restored, run, mesh, logger)
    recorder = None
    if mesh.rank == 0:
        write_status(run_dir, Status("running", step, 0))
        with report_progress("opening metrics and trackers"):
            recorder = MetricsRecorder(
                recipe.metrics,
                run_dir,
                name=recipe.name,
                steps=recipe.training.steps,
                start_step=step,
                recipe=recipe.model_dump(),
                console=console,
                log=logger,
            )
    reorder, balance = build_arrangements(run, pipeline.descriptions, model_stages, mesh.device)
    loader = build_data(
        run,
        model,
        tokenizer,
        mesh,
        state=restored.state["data"] if restored else None,
        reorder=reorder,
        balance=balance,
        samples=samples,
        reads=pipeline.reads,
    )
    # Built last, because it may start a process, which the training loop closes.
    planner = build_planner(run, pipeline, mesh, logger)
    return RunComponents(
        run, run_dir, logger, mesh, tokenizer, model, pipeline, compilation, planner, optimizer,
        average, checkpoints, restored, loader, held_out, recorder,
    )  # fmt: skip


def build_run_mesh(run: ResolvedRecipe, device: torch.device) -> ParallelMesh:
    """Return the mesh of the run, or of the module of this rank. Collective."""
    if run.units:
        return build_units(run.units, device)
    return build_mesh(run.recipe.parallel, device)


def open_checkpoints(
    run: ResolvedRecipe,
    run_dir: Path,
    mesh: ParallelMesh,
    logger: logging.Logger,
    directory: CheckpointDirectory | None = None,
) -> CheckpointManager:
    """Claim the directory of the run and return its checkpoints. Collective."""
    recipe = run.recipe
    digest = hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()
    table = recipe.model_dump(mode="json", exclude_none=True)
    return CheckpointManager(
        recipe.checkpoint, run_dir, logger, mesh.sizes, digest, table, directory, recipe.data
    )


def _log_resume(
    restored: RestoredRun | None, run: ResolvedRecipe, mesh: ParallelMesh, logger: logging.Logger
) -> int:
    """Return the last finished step, and seed random numbers if the layout changed."""
    if restored is None:
        return 0
    logger.info("resumed from %s", restored.path)
    recipe = run.recipe
    steps = recipe.training.steps
    saved_steps = restored.recipe.get("training", {}).get("steps", steps)
    change = describe_schedule_change(restored.step, saved_steps, steps, recipe.optimizer)
    if change is not None and mesh.rank == 0:
        logger.warning("%s", change)
    for key in run.choices:
        name = key.removeprefix("data.")
        value = getattr(recipe.data, name)
        saved = restored.recipe.get("data", {}).get(name)
        if mesh.rank == 0 and saved not in (None, value):
            logger.warning(
                '%s = "auto" selects "%s", but the checkpoint was trained with "%s". The '
                "samples of each step are the same, but sums differ by rounding; set %s = "
                '"%s" to use the saved value',
                key, value, saved, key, saved,
            )  # fmt: skip
    if restored.step >= steps:
        logger.info(
            "all %d steps are complete; raise training.steps or training.epochs to continue, "
            'or change name or set checkpoint.resume = "none" to start a new run',
            steps,
        )
    if restored.rng is None:  # the checkpoint is from a different number of ranks or layout
        seed_rank(run, mesh, restored.step)
    return restored.step
