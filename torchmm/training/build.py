"""From a recipe to the parts of a run: mesh, model, optimizer, data, checkpoints, records.

The order matters: the model is parallelized on the meta device before any memory is taken, and the
checkpoint decides where data begins. The loop restores the random state last, when all is built.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import datasets
import torch
import transformers
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from torchmm.balance.disttrain.arrangement import dealt, image_balance, run_arrangement
from torchmm.balance.disttrain.reordering.step import StepReorder
from torchmm.balance.image_shares import ImageBalance
from torchmm.balance.pipeweaver.segments import chosen_segments, leaves_segments_open
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError
from torchmm.common.files import replace_atomically
from torchmm.common.log import make_console, setup_logging, working
from torchmm.common.module_names import LLM
from torchmm.common.processes import keep_freed_memory
from torchmm.common.rng import seed_everything
from torchmm.common.row_slices import Reads
from torchmm.data.loader import Loader, build_loader
from torchmm.data.media.medium import open_media
from torchmm.data.samples import SampleSet, find_samples
from torchmm.data.shared_reader import ReaderAddress
from torchmm.data.sources.open import Samples
from torchmm.data.tokenizer import load_tokenizer, untrained_tokens
from torchmm.models.hf.adapter_files import load_adapters
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize, module_of
from torchmm.parallel.apply import parallelize
from torchmm.parallel.attention_kernels import kernel_problems, use_kernels
from torchmm.parallel.compilation import Compilation, compiler_problem
from torchmm.parallel.context import context_problems, cut_problems
from torchmm.parallel.exchange import data_parallel_exchange
from torchmm.parallel.expert import expert_problems
from torchmm.parallel.gather import gather_texts
from torchmm.parallel.health.preflight import check_ranks
from torchmm.parallel.mesh import ParallelMesh, build_mesh, build_units, encoder_meshes
from torchmm.parallel.tensor.apply import tensor_problems
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.run.cut import cut_for_rank
from torchmm.planning.converters import find_converters
from torchmm.planning.executions import (
    module_executions,
    run_costs,
    run_profile,
)
from torchmm.planning.first_step import first_step, one_by_one
from torchmm.planning.resolved import Resolved, recipe_model
from torchmm.planning.run_length import estimate_pass_steps, length_lines
from torchmm.planning.step import plan_layout
from torchmm.planning.summary import run_summary
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import dump_recipe
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.load import Restored
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.ending import Status, write_status
from torchmm.training.metrics import MetricsRecorder
from torchmm.training.optim import build_optimizer, describe_schedule_change
from torchmm.training.optimizers.average import WeightAverage
from torchmm.training.optimizers.optimizer import RunOptimizer, find_optimizer
from torchmm.training.parts import RunParts
from torchmm.training.pipeline import Pipeline
from torchmm.training.planners.table import build_planner
from torchmm.training.report import print_summary


class ModelCut(NamedTuple):
    """How a model is cut into stages, known before ranks meet."""

    parallel: ParallelConfig
    """With segments chosen where the recipe leaves them open."""
    layout: StageLayout


def build_unfilled_model(run: Resolved) -> tuple[MultimodalModel, PreTrainedTokenizerBase]:
    """The model on the meta device and its tokenizer; needs no process group.

    Raises:
        ConfigError: all that is wrong with the recipe's model and tokenizer.
    """
    _quiet_libraries()
    recipe = run.recipe
    problems: list[str] = []
    if not recipe.data.sources and not recipe.data.validation:
        problems.append("data.sources: nothing to train on; the recipe only describes a simulation")
    model = tokenizer = None
    try:
        model = recipe_model(recipe, DTYPES[recipe.training.parameter_dtype])
    except ConfigError as error:
        problems += error.problems
    try:
        tokenizer = load_tokenizer(recipe.model)
    except ConfigError as error:
        problems += error.problems
    if model is None or tokenizer is None or problems:
        raise ConfigError(problems)
    dtype = DTYPES[recipe.training.parameter_dtype]
    wide = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype != dtype]
    if wide:  # FSDP2 has one dtype for all trained parameters of a layer
        raise ConfigError(
            f'training.parameter_dtype = "{recipe.training.parameter_dtype}": Hugging Face keeps '
            f'{wide[0]} in float32; freeze the module, or use "float32"'
        )
    specs = model.sample_specs(tokenizer)  # raises if they do not fit each other
    for spec in specs["image_specs"].values():
        open_media(spec, recipe.data.max_image_pixels)
    return model, tokenizer


@working("reading sizes of the first samples, and cutting the model")
def cut_model(
    run: Resolved,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> ModelCut:
    """Into which stages the model is cut, on all ranks alike; needs no process group.

    The recipe's own checks (`torchmm.recipe.check`) know what it says. Here is the model: its
    heads and experts, the layers of sources, weights that are tied, and the stages that the first
    step's samples lead to.

    Args:
        model: on the meta device, whole.

    Raises:
        ConfigError: the model cannot be split over so many ranks; every problem found.
        DataError: the samples whose sizes decide the cut cannot be read.
    """
    modules = list(model.modality_modules())
    descriptions = [module.describe() for module in modules]
    executions = module_executions(run, descriptions, device.type)
    parallel = run.recipe.parallel
    problems = [
        problem
        for module in modules
        for problem in tensor_problems(
            module, executions[module.name].tensor, parallel.async_tensor_parallel
        )
    ]
    problems += context_problems(model.llm, parallel.context, run.llm.tensor)
    is_narrow = run.recipe.training.parameter_dtype != "float32"
    optimizer = find_optimizer(run.recipe.optimizer, is_narrow=is_narrow)
    for module in descriptions:
        sizes = executions[module.name]
        problems += optimizer.find_problems(run.recipe.optimizer, module, sizes.tensor)
    tensor = {name: own.tensor for name, own in executions.items()}
    for converter in find_converters(run.recipe):
        problems += converter.find_problems(modules, device, tensor)
    problems += kernel_problems(run.recipe.training.attention, device)
    missing = compiler_problem(run.recipe.compile, device.type)
    if missing and run.recipe.compile.enabled is True:
        problems.append(f"compile.enabled = true: {missing}")
    if problems := problems + expert_problems(model.llm, parallel.expert):
        raise ConfigError(problems)
    # Always of the first step, so that a resumed run is cut as before.
    shares = first_step(run.recipe, model, tokenizer, run.shares) if run.is_cut else []
    shares = shares or [[MicrobatchMeta((), run.recipe.training.sequence_length)]]
    microbatches = [meta for share in shares for meta in share]
    if leaves_segments_open(parallel):
        costs = run_costs(run, descriptions, run_profile(run.recipe, device))
        is_reordered = run.recipe.data.is_reordered
        packs = first_step(one_by_one(run.recipe), model, tokenizer, 1) if is_reordered else []
        if packs:  # as they are dealt for the model as it would be cut without a choice
            layout = plan_layout(parallel, descriptions, microbatches)
            shares = dealt(run, descriptions, costs, layout, packs[0])
        parallel = chosen_segments(run.recipe, parallel, descriptions, shares, costs)
    layout = plan_layout(parallel, descriptions, microbatches, run.units or None)
    stops = [stage.stop for stage in layout.stages if stage.module == LLM]
    if problems := cut_problems(model.llm, parallel.context, stops[:-1]):
        raise ConfigError(problems)
    return ModelCut(parallel, layout)


def build_run(
    run: Resolved,
    run_dir: Path,
    device: torch.device,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    cut: ModelCut,
    directory: CheckpointDirectory | None = None,
    streams: ReaderAddress | None = None,
) -> RunParts:
    """Builds everything else and fills `model`; collective over the started process group.

    Args:
        cut: of the model (`cut_model`).
        directory: of the checkpoints, where rank 0 may have claimed it already.
        streams: the process that reads this machine's streams; None: every rank does.

    Raises:
        ConfigError, DataError, CheckpointError: what was asked for cannot be had.
    """
    recipe = run.recipe
    console = make_console()
    mesh = build_run_mesh(run, device)
    logger = setup_logging(run_dir, mesh.rank, console)
    # First of all: nothing of a run that is alive may be overwritten.
    checkpoints = open_checkpoints(run, run_dir, mesh, logger, directory)
    _prepare_ranks(run, mesh, logger)
    _compare_choices(run, logger)
    if mesh.rank == 0:
        write_status(run_dir, Status("running", 0, 0))  # how an earlier run ended is past
        replace_atomically(run_dir / "recipe.toml", dump_recipe(recipe).encode())
        print_summary(console, recipe.name, run_summary(run, model, device.type))
        learns = model.llm.embedding.weight.requires_grad
        if warning := untrained_tokens(recipe.model, tokenizer, trains_embeddings=learns):
            logger.warning(warning)
    data = open_data(run, model, tokenizer, streams)  # weights need not load for data that are none
    if mesh.rank == 0:
        logger.info("%s\n%s (`torchmm inspect` shows them)", *data.training.digest())
        _log_length(run, model, data.training, logger)
    pipeline, compilation = fill_model(run, model, mesh, cut)
    optimizer = _optimizer(run, model)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    decay = recipe.training.ema_decay
    average = None if decay is None else WeightAverage(model, decay)
    restored = checkpoints.resume(model, optimizer, restarted, average)
    step = _step_after(restored, run, mesh, logger)
    recorder = _recorder(run, run_dir, step, console, logger) if mesh.rank == 0 else None
    reorder = run_arrangement(run, pipeline.descriptions, *cut, mesh.device)
    loader = build_data(
        run,
        model,
        tokenizer,
        mesh,
        state=restored.state["data"] if restored else None,
        reorder=reorder,
        balance=image_balance(recipe, pipeline.descriptions),
        samples=data.training,
        reads=pipeline.reads,
    )
    # Built last, because it may start a process, which the training loop closes.
    planner = build_planner(run, pipeline, mesh, logger)
    return RunParts(
        run, run_dir, logger, mesh, tokenizer, model, pipeline, compilation, planner, optimizer,
        average, checkpoints, restored, loader, data.held_out, recorder,
    )  # fmt: skip


def _log_length(
    run: Resolved, model: MultimodalModel, samples: SampleSet, logger: logging.Logger
) -> None:
    """Log passes over the data and disk space, and what the run would lose or repeat."""
    is_known = isinstance(samples, Samples) and not samples.streamed
    pass_steps = estimate_pass_steps(samples, run.recipe) if is_known else None
    for label, text in length_lines(run.recipe, model, pass_steps).items():
        is_warning = label.startswith("warning")
        logger.log(logging.WARNING if is_warning else logging.INFO, "%s: %s", label, text)


def _step_after(
    restored: Restored | None, run: Resolved, mesh: ParallelMesh, logger: logging.Logger
) -> int:
    """Return the last finished step, and seed the random numbers after it."""
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
                '%s = "auto" is "%s" now, the checkpoint was trained with "%s". Samples of a step '
                'are the same, sums differ by rounding; set %s = "%s" to keep it',
                key, value, saved, key, saved,
            )  # fmt: skip
    if restored.step >= steps:
        logger.info(
            "all %d steps are done already; for more raise training.steps or training.epochs, "
            'for a new run change name or set checkpoint.resume = "none"',
            steps,
        )
    if restored.rng is None:  # of another number of ranks
        seed_everything(recipe.training.seed, *_random_stream(mesh), restored.step)
    return restored.step


def _compare_choices(run: Resolved, logger: logging.Logger) -> None:
    """Log the values that were chosen for "auto"; collective.

    Raises:
        ConfigError: Ranks chose different values.
    """
    data = run.recipe.data
    of_ranks = gather_texts(f'data.reorder = "{data.reorder}", data.balance = "{data.balance}"')
    if len(set(of_ranks)) > 1:
        found = "; ".join(dict.fromkeys(of_ranks))
        raise ConfigError(
            f'data.reorder, data.balance: ranks chose different values for "auto" '
            f"({found}); set both keys"
        )
    if run.shares > 1:
        for key, text in run.choices.items():
            logger.info("%s = auto: %s", key, text)


def _optimizer(run: Resolved, model: MultimodalModel) -> RunOptimizer:
    copies = model.tied_copy_parameters()
    matrices = model.layer_matrices()
    dtype = DTYPES[run.recipe.training.dtype]
    return build_optimizer(model, module_of, run.recipe.optimizer, copies, matrices, dtype)


@working("opening records and trackers")
def _recorder(
    run: Resolved, run_dir: Path, step: int, console: Console, logger: logging.Logger
) -> MetricsRecorder:
    """Goes on after `step`."""
    recipe = run.recipe
    return MetricsRecorder(
        recipe.metrics,
        run_dir,
        name=recipe.name,
        steps=recipe.training.steps,
        start_step=step,
        recipe=recipe.model_dump(),
        console=console,
        log=logger,
    )


def build_run_mesh(run: Resolved, device: torch.device) -> ParallelMesh:
    """The mesh of the run, or of this rank's module; collective."""
    if run.units:
        return build_units(run.units, device)
    return build_mesh(run.recipe.parallel, device)


class OpenData(NamedTuple):
    """The sources of a run."""

    training: SampleSet
    held_out: SampleSet | None
    """None: nothing is validated."""


@working("opening the data")
def open_data(
    run: Resolved,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    streams: ReaderAddress | None = None,
) -> OpenData:
    """Opens the run's sources and measures them; needs no weights.

    Args:
        streams: the process that reads this machine's streams; None: this one does.

    Raises:
        ConfigError, DataError: a source cannot be read, or gives nothing.
    """
    recipe = run.recipe
    specs = model.sample_specs(tokenizer)
    find = partial(find_samples, recipe.data, recipe.training, streams=streams, **specs)
    held_out = None
    if recipe.data.validation and (recipe.validation.interval or recipe.validation.samples):
        held_out = find(validation=True)
    return OpenData(find(), held_out)


def build_data(  # noqa: PLR0913 - what a run consists of
    run: Resolved,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    mesh: ParallelMesh,
    *,
    state: dict | None = None,
    validation: bool = False,
    for_prompts: bool = False,
    reorder: StepReorder | None = None,
    balance: ImageBalance | None = None,
    samples: SampleSet | None = None,
    reads: Reads | None = None,
) -> Loader:
    """This rank's loader of training or held-out samples.

    Args:
        state: data position to go on from.
        validation: held-out samples, decoded in this process (they are few and kept).
        for_prompts: the same samples on all ranks, one sequence per microbatch.
        reorder: which packs of a global batch go where; None: in natural order.
        balance: Assigns the images of a microbatch to ranks; None: each rank encodes its own.
        samples: of the same sources, if they were opened before.
        reads: which images it decodes; None: all of its share.
    """
    data = run.recipe.data
    training = run.recipe.training
    if validation:
        data = data.model_copy(update={"workers": 0})
    if for_prompts:
        training = training.model_copy(update={"microbatch_size": 1})
    return build_loader(
        data,
        training,
        data_parallel_rank=0 if for_prompts else mesh.data_parallel_rank,
        data_parallel_size=1 if for_prompts else mesh.data_parallel_size,
        state=state,
        validation=validation,
        arrange=reorder,
        balance=balance,
        resume_changed=run.recipe.checkpoint.resume_changed_data,
        samples=samples,
        reads=reads,
        **model.sample_specs(tokenizer),
    )


class FilledModel(NamedTuple):
    """A rank's part of a model, ready to run."""

    pipeline: Pipeline
    compilation: Compilation
    """Of its layers."""


@working("cutting and filling the model")
def fill_model(
    run: Resolved, model: MultimodalModel, mesh: ParallelMesh, cut: ModelCut
) -> FilledModel:
    """Cuts the model and splits it over the mesh, then fills only this rank's part; collective."""
    recipe = run.recipe
    training = recipe.training
    descriptions = [module.describe() for module in model.modality_modules()]
    stages = cut_for_rank(model, cut.layout, mesh.pipeline_rank)
    for converter in find_converters(recipe):
        for module in model.all_stages():
            converter.convert(module)
    encoders = [module.name for module in descriptions if module.kind == "encoder"]
    compilation = parallelize(
        model,
        mesh,
        recipe.parallel,
        recipe.activation_checkpoint,
        recipe.compile,
        DTYPES[training.dtype],
        training.microbatch_size * training.sequence_length,
        meshes=encoder_meshes(recipe.parallel, mesh, encoders),
    )
    materialize(model, mesh.device)
    sources = {name: a.source for name, a in recipe.adapters.items() if a.source is not None}
    filled = load_weights(model) | load_adapters(model, sources)
    init_weights(model, training.seed, skip=filled)
    dtype = DTYPES[training.dtype]
    exchange = data_parallel_exchange(mesh) if recipe.data.balance == "images" else None
    pipeline = Pipeline(
        model, stages, cut.layout, descriptions, cut.parallel, mesh, dtype, exchange
    )
    return FilledModel(pipeline, compilation)


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


@working("measuring the ranks")
def _prepare_ranks(run: Resolved, mesh: ParallelMesh, logger: logging.Logger) -> None:
    """What comes before anything is computed; collective."""
    training = run.recipe.training
    check_ranks(mesh, DTYPES[training.dtype], run.recipe.parallel.preflight, logger)
    if mesh.device.type == "cpu":
        keep_freed_memory()
    logger.info(use_kernels(training.attention, mesh.device))
    seed_everything(training.seed, *_random_stream(mesh))
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def open_checkpoints(
    run: Resolved,
    run_dir: Path,
    mesh: ParallelMesh,
    logger: logging.Logger,
    directory: CheckpointDirectory | None = None,
) -> CheckpointManager:
    """The checkpoints of a run directory, which is claimed for this run; collective."""
    recipe = run.recipe
    digest = hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()
    table = recipe.model_dump(mode="json", exclude_none=True)
    give_up_s = recipe.data.storage.give_up_s
    return CheckpointManager(
        recipe.checkpoint, run_dir, logger, mesh.sizes, digest, table, directory, give_up_s
    )
