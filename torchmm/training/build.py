"""From a recipe to the parts of a run: mesh, model, optimizer, data, checkpoints, records.

The order matters: the model is parallelized on the meta device before any memory is taken, the
checkpoint decides where data begins, and random state is put back last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import datasets
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from torchmm.balance.costs.model import CostModel
from torchmm.common.batch import MicrobatchMeta, ModuleDescription
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError
from torchmm.common.files import replace_atomically
from torchmm.common.log import setup_logging
from torchmm.common.processes import keep_freed_memory
from torchmm.common.rng import seed_everything
from torchmm.data.loader import Loader, build_loader
from torchmm.data.step_packs import Arrange
from torchmm.data.tokenizer import load_tokenizer
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize, module_of
from torchmm.models.registry import build_model
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import ParallelMesh, build_mesh, encoder_meshes
from torchmm.parallel.unit_mesh import build_units
from torchmm.pipelining.run.cut import cut_for_rank
from torchmm.planning.executions import run_costs, run_profile, run_tuning
from torchmm.planning.reordering import arrangement
from torchmm.planning.segments import leaves_segments_open, with_segments
from torchmm.planning.step import plan_layout
from torchmm.planning.summary import run_summary
from torchmm.recipe.placement_sizes import units_of
from torchmm.recipe.read import dump_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.manager import CheckpointManager, Restored
from torchmm.training.ending import Status, write_status
from torchmm.training.metrics import MetricsRecorder
from torchmm.training.optim import build_optimizer
from torchmm.training.pipeline import Pipeline
from torchmm.training.report import print_summary


@dataclass
class RunParts:
    """The parts of one run, ready for the loop."""

    recipe: Recipe
    run_dir: Path
    logger: logging.Logger
    mesh: ParallelMesh
    tokenizer: PreTrainedTokenizerBase
    model: MultimodalModel
    """This rank's part of it."""
    descriptions: list[ModuleDescription]
    """Of its modules, whole."""
    pipeline: Pipeline
    optimizer: torch.optim.AdamW
    checkpoints: CheckpointManager
    restored: Restored | None
    loader: Loader
    recorder: MetricsRecorder | None
    """On rank 0."""


class SampleShare(NamedTuple):
    """Which samples a rank works on, as its mesh says it too."""

    data_parallel_rank: int
    data_parallel_size: int


def build_unfilled_model(recipe: Recipe) -> tuple[MultimodalModel, PreTrainedTokenizerBase]:
    """The model on the meta device and its tokenizer; needs no process group.

    Raises:
        ConfigError: all that is wrong with the recipe's model and tokenizer.
    """
    _quiet_libraries()
    problems: list[str] = []
    if not recipe.data.sources and not recipe.data.validation:
        problems.append("data.sources: nothing to train on; the recipe only describes a simulation")
    model = tokenizer = None
    try:
        model = build_model(recipe.model, recipe.freeze)
    except ConfigError as error:
        problems += error.problems
    try:
        tokenizer = load_tokenizer(recipe.model)
    except ConfigError as error:
        problems += error.problems
    if model is None or tokenizer is None or problems:
        raise ConfigError(problems)
    model.text_spec(tokenizer)  # raises if they do not fit each other
    return model, tokenizer


def build_run(
    recipe: Recipe,
    run_dir: Path,
    device: torch.device,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: CheckpointDirectory | None = None,
) -> RunParts:
    """Builds everything else and fills `model`; collective over the started process group.

    Args:
        directory: of the checkpoints, where rank 0 may have claimed it already.

    Raises:
        ConfigError, DataError, CheckpointError: what was asked for cannot be had.
    """
    console = Console()
    mesh = build_run_mesh(recipe, device)
    logger = setup_logging(run_dir, mesh.rank, console)
    # First of all: nothing of a run that is alive may be overwritten.
    checkpoints = open_checkpoints(recipe, run_dir, mesh, logger, directory)
    _set_numerics(recipe, mesh)
    if device.type == "cpu":
        keep_freed_memory()
    if mesh.rank == 0:
        write_status(run_dir, Status("running", 0, 0))  # how an earlier run ended is past
        replace_atomically(run_dir / "recipe.toml", dump_recipe(recipe).encode())
        print_summary(console, recipe.name, run_summary(recipe, model, mesh.world_size))
    descriptions = [module.describe() for module in model.modality_modules()]
    pipeline = fill_model(recipe, model, tokenizer, mesh)
    copies = model.tied_copy_parameters()
    optimizer = build_optimizer(model, module_of, recipe.optimizer, copies)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    restored = checkpoints.resume(model, optimizer, restarted)
    step = restored.step if restored else 0
    if restored:
        logger.info("resumed from %s", restored.path)
        if restored.rng is None:
            seed_everything(recipe.training.seed, *_random_stream(mesh), step)
    recorder = None
    if mesh.rank == 0:
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
    state = restored.state["data"] if restored else None
    arrange = _arrange(recipe, descriptions, pipeline, mesh)
    loader = build_data(recipe, model, tokenizer, mesh, state=state, arrange=arrange)
    return RunParts(
        recipe, run_dir, logger, mesh, tokenizer, model, descriptions, pipeline, optimizer,
        checkpoints, restored, loader, recorder,
    )  # fmt: skip


def build_run_mesh(recipe: Recipe, device: torch.device) -> ParallelMesh:
    """The mesh of the run, or of this rank's module; collective.

    Raises:
        ConfigError: the sizes do not make the number of ranks.
    """
    units = units_of(recipe, dist.get_world_size())
    return build_units(units, device) if units else build_mesh(recipe.parallel, device)


def build_data(
    recipe: Recipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    mesh: ParallelMesh | SampleShare,
    *,
    state: dict | None = None,
    validation: bool = False,
    for_prompts: bool = False,
    arrange: Arrange | None = None,
) -> Loader:
    """This rank's loader of training or held-out samples.

    Args:
        state: data position to go on from.
        validation: held-out samples, decoded in this process (they are few and kept).
        for_prompts: the same samples on all ranks, one sequence per microbatch.
        arrange: which packs of a global batch go where; None: in natural order.
    """
    data, training = recipe.data, recipe.training
    if validation:
        data = data.model_copy(update={"workers": 0})
    if for_prompts:
        training = training.model_copy(update={"microbatch_size": 1})
    return build_loader(
        data,
        training,
        text_spec=model.text_spec(tokenizer),
        image_specs=model.image_specs(),
        tokenizer=tokenizer,
        data_parallel_rank=0 if for_prompts else mesh.data_parallel_rank,
        data_parallel_size=1 if for_prompts else mesh.data_parallel_size,
        state=state,
        validation=validation,
        generator_spec=model.generator_spec(),
        arrange=arrange,
        resume_changed=recipe.checkpoint.resume_changed_data,
    )


def fill_model(
    recipe: Recipe, model: MultimodalModel, tokenizer: PreTrainedTokenizerBase, mesh: ParallelMesh
) -> Pipeline:
    """Cuts the model and splits it over the mesh, then fills only this rank's part; collective.

    Raises:
        ConfigError: the model cannot be cut as the recipe says.
        DataError: the samples whose sizes decide the cut cannot be read.
    """
    descriptions = [module.describe() for module in model.modality_modules()]
    microbatches = typical_microbatches(
        recipe, model, tokenizer, mesh.pipeline_size, mesh.data_parallel_size
    )
    parallel = recipe.parallel
    if leaves_segments_open(parallel):
        costs = _costs(recipe, descriptions, mesh)
        parallel = with_segments(parallel, descriptions, microbatches, costs)
    layout = plan_layout(parallel, descriptions, microbatches, mesh.unit_layouts)
    stages = cut_for_rank(model, layout, mesh.pipeline_rank)
    dtype = DTYPES[recipe.training.dtype]
    tokens = recipe.training.microbatch_size * recipe.training.sequence_length
    encoders = [module.name for module in descriptions if module.kind == "encoder"]
    how = (recipe.activation_checkpoint, recipe.compile, dtype, tokens)
    meshes = encoder_meshes(recipe.parallel, mesh, encoders)
    parallelize(model, mesh, recipe.parallel, *how, meshes=meshes)
    materialize(model, mesh.device)
    init_weights(model, recipe.training.seed, skip=load_weights(model))
    pipeline = Pipeline(model, stages, layout, descriptions, parallel, mesh, dtype)
    pipeline.tuning = run_tuning(
        recipe, descriptions, mesh.world_size, mesh.device, layerwise=pipeline.sharding == "layer"
    )
    return pipeline


def _costs(recipe: Recipe, modules: list[ModuleDescription], mesh: ParallelMesh) -> CostModel:
    return run_costs(recipe, modules, mesh.world_size, run_profile(recipe, mesh.device))


def _arrange(
    recipe: Recipe, modules: list[ModuleDescription], pipeline: Pipeline, mesh: ParallelMesh
) -> Arrange | None:
    if recipe.data.reorder == "none":
        return None
    costs = _costs(recipe, modules, mesh)
    return arrangement(recipe, modules, costs, pipeline.layout, mesh.data_parallel_size)


def typical_microbatches(
    recipe: Recipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    pipeline_size: int,
    data_parallel_size: int,
) -> list[MicrobatchMeta]:
    """Metadata of the first step's microbatches, of all ranks; nothing is decoded.

    Always those of the first step, so that a resumed run is cut as before.
    """
    empty = [MicrobatchMeta((), recipe.training.sequence_length)]
    if pipeline_size == 1:
        return empty  # nothing is cut
    sources = recipe.data.sources or recipe.data.validation
    data = recipe.data.model_copy(update={"workers": 0, "sources": sources})
    first = recipe.model_copy(update={"data": data})
    loader = build_data(first, model, tokenizer, SampleShare(0, data_parallel_size))
    return [meta for rank in loader.next_metas() or [] for meta in rank] or empty


def _quiet_libraries() -> None:
    """Silences what is known, harmless and repeated by every rank."""
    # Nothing is done in place to what a module returns.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Norms over a 2-D mesh are reduced one dimension after the other: one scalar per step.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # The replacement of this collective does not exist in the oldest supported torch.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor. is deprecated")
    datasets.disable_progress_bars()
    # Images are prepared by Pillow; torchvision is not needed.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _random_stream(mesh: ParallelMesh) -> tuple[int, ...]:
    """Coordinates of the random stream of a rank: its samples and its place in the pipeline.

    Ranks of one tensor-parallel group share both and must share dropout masks.
    """
    place = (mesh.pipeline_rank // mesh.mirrors,) if mesh.pipeline_size > 1 else ()
    return mesh.data_parallel_rank, *place


def _set_numerics(recipe: Recipe, mesh: ParallelMesh) -> None:
    seed_everything(recipe.training.seed, *_random_stream(mesh))
    if recipe.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def open_checkpoints(
    recipe: Recipe,
    run_dir: Path,
    mesh: ParallelMesh,
    logger: logging.Logger,
    directory: CheckpointDirectory | None = None,
) -> CheckpointManager:
    """The checkpoints of a run directory, which is claimed for this run; collective."""
    digest = hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()
    table = recipe.model_dump(mode="json", exclude_none=True)
    return CheckpointManager(
        recipe.checkpoint, run_dir, logger, mesh.sizes, digest, table, directory
    )
