"""Check the values of a recipe against each other, the disk and the number of ranks.

These checks require neither torch nor downloads. Checks that require the model itself (layer
counts, TP plans) run when the model is built, before any weight is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from glob import glob
from pathlib import Path

from torchmm.common.errors import ConfigError
from torchmm.common.extensions import NOT_INSTALLED, find_entries, find_entry
from torchmm.common.module_names import LLM
from torchmm.recipe.check_model import (
    check_adapters,
    check_generator,
    check_model,
    check_validation,
    is_path,
)
from torchmm.recipe.check_parallel import check_pipeline, check_tensor
from torchmm.recipe.data_section import (
    SourceConfig,
    StageConfig,
    find_credential,
    is_address,
    local_path,
    unique_names,
)
from torchmm.recipe.explain import NO_VALUE, Problem, Problems, suggest
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.placement_sizes import (
    check_colocated,
    check_planned_units,
    check_units,
    resolve_sizes,
    resolve_units,
    unit_sizes,
    with_placeholder_sizes,
)
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import find_schedule
from torchmm.recipe.training_section import (
    LOW_PRECISION_PREFIX,
    limit_bytes,
    optimizer_entry,
)


def find_problems(recipe: Recipe, world_size: int | None) -> list[Problem]:
    """Return the problems of all value checks.

    Extensions add checks with entries of the table "recipe_checks": functions with the parameters
    and the return type of this function.

    Args:
        recipe: Recipe whose keys and types are valid.
        world_size: Number of ranks. If None, checks that require it are skipped.
    """
    recipe = with_placeholder_sizes(recipe)
    of_extensions = [
        problem
        for entry in find_entries("recipe_checks")
        for problem in entry.load()(recipe, world_size)
    ]
    return [
        *_check_run(recipe),
        *check_model(recipe),
        *check_generator(recipe),
        *check_adapters(recipe),
        *check_validation(recipe),
        *_check_modules(recipe),
        *_check_data(recipe),
        *_check_layout(recipe, world_size),
        *check_tensor(recipe),
        *check_pipeline(recipe),
        *_check_optimizer(recipe),
        *_check_metrics(recipe),
        *_check_memory_limit(recipe),
        *_check_installed(recipe),
        *of_extensions,
    ]


def _check_installed(recipe: Recipe) -> Problems:
    """Yield values that require entries of "balance" if that extension is not installed."""
    data = recipe.data
    parallel = recipe.parallel
    schedule = find_schedule(parallel.schedule)
    is_planned = schedule is not None and schedule.planned
    drift = parallel.replan_threshold
    bubbles = parallel.tp_comm_fraction
    required = [
        ("data.reorder", data.reorder, data.is_reordered, "step_arrangements", "data.reorder"),
        (
            "data.balance",
            data.balance,
            data.balance == "images",
            "step_arrangements",
            "data.balance",
        ),
        ("parallel.schedule", parallel.schedule, is_planned, "schedules", parallel.schedule),
        ("parallel.auto_sizes", True, parallel.auto_sizes, "recipe_choices", "sizes"),
        ("parallel.replan_threshold", drift, drift > 0, "planners", "measuring"),
        ("parallel.tp_comm_fraction", bubbles, bubbles > 0, "action_runners", "launches"),
    ]
    checkpointing = recipe.activation_checkpoint
    modes = {"mode": checkpointing.mode}
    modes |= {f"modules.{name}": mode for name, mode in checkpointing.modules.items()}
    required += [
        (f"activation_checkpoint.{key}", mode, mode == "auto", "planners", "tuned")
        for key, mode in modes.items()
    ]
    for key, value, is_used, table, name in required:
        if is_used:
            yield from _check_entry(key, value, table, name, "balance")


def module_names(recipe: Recipe) -> list[str]:
    """Return the module names that sections may use: llm, NAME, NAME.connector."""
    parts = [name for name in recipe.model.modality_modules if name != LLM]
    return [LLM, *(n for name in parts for n in (name, f"{name}.connector"))]


def _check_run(recipe: Recipe) -> Problems:
    """Yield problems of the name of the run and of its checkpoints."""
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", recipe.name):
        text = "must be a plain directory name; use letters, digits, '-', '_' and '.'"
        yield Problem("name", recipe.name, text)
    yield from _check_resume(recipe.checkpoint.resume)
    upload = recipe.checkpoint.remote_dir
    staging = recipe.checkpoint.staging_dir
    if upload is not None:
        yield from _check_address("checkpoint.remote_dir", upload)
        if not upload or set("*?[") & set(upload):
            text = "is empty or contains wildcards; set one folder"
            yield Problem("checkpoint.remote_dir", upload, text)
        elif upload.lower().startswith("memory://"):
            text = "is lost when the process that writes it exits; use a bucket or a directory"
            yield Problem("checkpoint.remote_dir", upload, text)
        elif not is_address(upload):
            yield from _local_directory("checkpoint.remote_dir", upload)[1]
    elif staging is not None:
        text = (
            "requires checkpoint.remote_dir, because the local disk of one node has only some "
            "shards of a checkpoint"
        )
        yield Problem("checkpoint.staging_dir", staging, text, ("checkpoint.remote_dir",))
    if staging is not None and is_address(staging):
        text = "is a URL; use a directory on the local disk of each node"
        yield Problem("checkpoint.staging_dir", staging, text)
    elif staging is not None:
        yield from _local_directory("checkpoint.staging_dir", staging)[1]


def _check_resume(resume: str) -> Problems:
    if is_address(resume):
        yield from _check_address("checkpoint.resume", resume)
    elif resume not in ("auto", "none"):
        directory, problems = _local_directory("checkpoint.resume", resume)
        yield from problems
        if directory is not None and not directory.is_dir():
            text = 'is not a directory; use "auto", "none" or the directory of a checkpoint'
            yield Problem("checkpoint.resume", resume, text)


def _local_directory(key: str, path: str) -> tuple[Path | None, list[Problem]]:
    """Return the path in a value, or None and the problems of the value."""
    try:
        return local_path(path), []
    except ValueError as error:
        return None, [Problem(key, path, str(error))]


def check_names(recipe: Recipe, key: str, names: Iterable[str]) -> Problems:
    """Yield a problem for each name in the value of `key` that is not a module of the recipe."""
    known = module_names(recipe)
    for name in names:
        if name not in known:
            text = f"unknown module{suggest(name, known)}; use one of: {', '.join(known)}"
            yield Problem(key, name, text, ("model",))


def _check_modules(recipe: Recipe) -> Problems:
    """Yield names that are not modules, and problems of frozen modules."""
    frozen = recipe.freeze.modules
    yield from check_names(recipe, "freeze.modules", frozen)
    yield from check_names(recipe, "compile.modules", recipe.compile.modules)
    yield from check_names(recipe, "optimizer.module_lr", recipe.optimizer.module_lr)
    checkpointed = recipe.activation_checkpoint.modules
    yield from check_names(recipe, "activation_checkpoint.modules", checkpointed)
    if set(module_names(recipe)) <= set(frozen) and not recipe.adapters:
        text = "leaves no module to train; remove at least one module from the list"
        yield Problem("freeze.modules", frozen, text, ("model",))
    for name, lr in recipe.optimizer.module_lr.items():
        key = f"optimizer.module_lr.{name}"
        if lr < 0:
            yield Problem(key, lr, "must be >= 0")
        if name in frozen and name not in recipe.adapted_modules:
            text = (
                f'"{name}" is frozen and has no learning rate; remove it from this table or '
                "from freeze.modules"
            )
            yield Problem(key, lr, text, ("freeze.modules",))


def _check_data(recipe: Recipe) -> Problems:
    data = recipe.data
    if not data.sources and not recipe.describes_samples:
        yield Problem("data.sources", [], "there is no training data; add a [[data.sources]] table")
    yield from check_source_paths(recipe)
    for list_name, sources in (("sources", data.sources), ("validation", data.validation)):
        yield from _check_sources(f"data.{list_name}", sources)
    yield from _check_stages(recipe)
    yield from _check_epochs(recipe)
    yield from _check_extensions(recipe)
    if data.video.min_frames > (max_frames := data.video.max_frames):
        text = (
            f"is above data.video.max_frames = {max_frames}; lower min_frames or raise max_frames"
        )
        key = "data.video.max_frames"
        yield Problem("data.video.min_frames", data.video.min_frames, text, (key,))


def _check_epochs(recipe: Recipe) -> Problems:
    """Yield why the steps of `training.epochs` cannot be counted."""
    data = recipe.data
    epochs = recipe.training.epochs
    key = "training.epochs"
    if epochs is None:
        return
    if not data.sources:
        text = "requires training data; add a [[data.sources]] table, or set training.steps"
        yield Problem(key, epochs, text, ("data.sources",))
    for index, source in enumerate(data.sources):
        if source.streaming:
            streaming = f"data.sources[{index}].streaming"
            text = f"the size of a stream is unknown; set training.steps, or {streaming} = false"
            yield Problem(key, epochs, text, (streaming,))
    if data.mixture_schedule:
        text = (
            "is not supported with data.mixture_schedule, whose ends are steps; set training.steps"
        )
        yield Problem(key, epochs, text, ("data.mixture_schedule",))
    if data.producers.plan:
        text = "only the producers read the sources and count samples; set training.steps"
        yield Problem(key, epochs, text, ("data.producers.plan",))


def check_source_paths(recipe: Recipe) -> Problems:
    """Yield problems of sources whose files do not exist, except sources on producer hosts."""
    data = recipe.data
    for list_name, sources in (("sources", data.sources), ("validation", data.validation)):
        for index, source in enumerate(sources):
            key = f"data.{list_name}[{index}]"
            if not data.producers.plan:
                yield from _check_path(f"{key}.path", source)
            elif source.streaming:
                text = (
                    "producers cannot plan a stream; set streaming = false, or "
                    "data.producers.plan = false"
                )
                yield Problem(f"{key}.streaming", True, text, ("data.producers.plan",))


def _check_extensions(recipe: Recipe) -> Problems:
    """Yield sources, producers, stores and losses of an extension that is not installed."""
    loss = recipe.training.loss
    if loss != "cross_entropy":
        yield from _check_entry("training.loss", loss, "loaded_models", loss, "preferences")
    data = recipe.data
    for list_name, sources in (("sources", data.sources), ("validation", data.validation)):
        for index, source in enumerate(sources):
            yield from _check_source_extensions(f"data.{list_name}[{index}]", source)
    producers = data.producers
    if producers.is_used:
        name = "addresses" if producers.addresses else "registry" if producers.registry else "plan"
        key = f"data.producers.{name}"
        yield from _check_entry(key, getattr(producers, name), "sample_services", "producers")
    upload = recipe.checkpoint.remote_dir
    if upload is not None:
        yield from _check_entry("checkpoint.remote_dir", upload, "checkpoint_stores", "addresses")
    resume = recipe.checkpoint.resume
    if is_address(resume):
        yield from _check_entry("checkpoint.resume", resume, "checkpoint_stores", "addresses")


def _check_source_extensions(key: str, source: SourceConfig) -> Problems:
    path = source.path
    if is_address(path):
        yield from _check_entry(f"{key}.path", path, "file_systems", "addresses")
    if source.format in ("energon", "lance"):
        name = source.format
        yield from _check_entry(f"{key}.format", name, "source_formats", name, "formats")
    elif source.format == "auto" and path.rstrip("/").endswith(".lance"):
        yield from _check_entry(f"{key}.path", path, "source_formats", "lance", "formats")
    elif source.format == "auto" and not is_address(path) and Path(path, ".nv-meta").is_dir():
        yield from _check_entry(f"{key}.path", path, "source_formats", "energon", "formats")


def _check_entry(
    key: str, value: object, table: str, name: str, extension: str = "remote"
) -> Problems:
    """Yield a problem if no installed extension has the entry that a value requires."""
    if find_entry(table, name) is None:
        yield Problem(key, value, NOT_INSTALLED.format(extension))


def _check_sources(section: str, sources: Sequence[SourceConfig]) -> Problems:
    """Yield conflicts between the keys of a source."""
    by_epochs = [source.epochs is not None for source in sources]
    for index, source in enumerate(sources):
        key = f"{section}[{index}]"
        if source.epochs is not None and source.weight != 1.0:
            text = f"cannot be combined with weight = {source.weight}; remove one of the two keys"
            yield Problem(f"{key}.epochs", source.epochs, text, (f"{key}.weight",))
        elif source.epochs is not None and source.streaming:
            text = "the size of a stream is unknown; set weight instead, or streaming = false"
            yield Problem(f"{key}.epochs", source.epochs, text, (f"{key}.streaming",))
        elif any(by_epochs) and source.epochs is None:
            text = (
                "is required because other sources set epochs; set epochs for every "
                "source, or weight for every source"
            )
            yield Problem(f"{key}.epochs", NO_VALUE, text, (section,))
        limits = source.filter
        if limits.max_tokens is not None and limits.min_tokens > limits.max_tokens:
            text = (
                f"is above max_tokens = {limits.max_tokens}; lower min_tokens or raise max_tokens"
            )
            depends_on = (f"{key}.filter.max_tokens",)
            yield Problem(f"{key}.filter.min_tokens", limits.min_tokens, text, depends_on)


def _check_stages(recipe: Recipe) -> Problems:
    data = recipe.data
    if not data.mixture_schedule:
        return
    names = unique_names(data.sources)
    for index, (name, source) in enumerate(zip(names, data.sources, strict=True)):
        key_name = "weight" if source.weight != 1.0 else "epochs"
        if source.weight != 1.0 or source.epochs is not None:
            text = "has no effect with data.mixture_schedule, which sets all weights; remove it"
            key = f"data.sources[{index}].{key_name}"
            yield Problem(key, getattr(source, key_name), text, ("data.mixture_schedule",))
        if not any(stage.weights.get(name) for stage in data.mixture_schedule):
            text = (
                f'no stage uses the source "{name}"; add it to the weights of a stage, or '
                "remove the source"
            )
            yield Problem("data.mixture_schedule", NO_VALUE, text, (f"data.sources[{index}]",))
    before = 0
    for index, stage in enumerate(data.mixture_schedule):
        last = stage is data.mixture_schedule[-1]
        yield from _check_stage(
            f"data.mixture_schedule[{index}]", stage, names, None if last else before
        )
        before = stage.until_step or before


def _check_stage(key: str, stage: StageConfig, names: list[str], before: int | None) -> Problems:
    """Yield problems of one phase of the mixture schedule.

    Args:
        key: Dotted key of the phase.
        stage: The phase.
        names: Names of all sources.
        before: Last step of the preceding phase, or None if this is the last phase.
    """
    until = stage.until_step
    if before is None and until is not None:
        text = "the last stage must not set until_step; remove the key, or add another stage"
        yield Problem(f"{key}.until_step", until, text)
    elif before is not None and (until is None or until <= before):
        value = NO_VALUE if until is None else until
        text = f"must be above {before}; every stage except the last requires until_step"
        yield Problem(f"{key}.until_step", value, text)
    for name, weight in stage.weights.items():
        if name not in names:
            text = f"unknown source{suggest(name, names)}; use one of: {', '.join(names)}"
            yield Problem(f"{key}.weights.{name}", weight, text, ("data.sources",))
        elif weight < 0:
            yield Problem(f"{key}.weights.{name}", weight, "must be >= 0")
    if not any(weight > 0 for weight in stage.weights.values()):
        text = "contains no source with a weight above 0; set at least one"
        yield Problem(f"{key}.weights", stage.weights, text)


def _check_address(key: str, address: str) -> Problems:
    if (secret := find_credential(address)) is not None:
        scheme, _, remaining = address.partition("://")
        shown = f"{scheme}://...{remaining.rpartition('@')[2].partition('?')[0]}"
        text = (
            f"contains a credential ({secret}), and URLs are written to logs and files; "
            "remove it and set the credential in the environment (docs/reference/data.md)"
        )
        yield Problem(key, shown, text)


def _check_path(key: str, source: SourceConfig) -> Problems:
    if is_address(source.path):
        yield from _check_address(key, source.path)
        return
    path = str(Path(source.path).expanduser())
    exists = Path(path).exists() or glob(path, recursive=True)  # noqa: PTH207 - absolute patterns
    if source.format != "hub" and not exists:
        text = "no such file or directory; run torchmm prepare-data SET or correct the path"
        if source.format == "auto" and not is_path(source.path):
            text += ' (set format = "hub" for a Hugging Face data set)'
        yield Problem(key, source.path, text)


def _check_layout(recipe: Recipe, world_size: int | None) -> Problems:
    parallel = recipe.parallel
    training = recipe.training
    modules = recipe.model.modality_modules
    keys = tuple(f"parallel.{name}" for name in MeshSizes._fields)
    layout = None
    is_disaggregated = parallel.placement == "disaggregated"
    yield from check_units(parallel, modules)
    if parallel.needs_orchestration:
        yield from check_planned_units(modules, world_size)
    elif world_size is not None:
        try:
            if is_disaggregated:
                layout = resolve_units(parallel, modules, world_size)[LLM]
            else:
                layout = resolve_sizes(parallel, world_size)
        except ConfigError as error:
            yield Problem("parallel", NO_VALUE, error.problems[0].partition(": ")[2], keys)
            return
    yield from check_colocated(parallel, recipe.model.encoder_names, layout)
    if layout is not None and layout.shard % parallel.expert:
        text = f"must divide the {layout.shard} ranks of parallel.shard; use a divisor"
        yield Problem("parallel.expert", parallel.expert, text, ("parallel.shard",))
    context = parallel.context
    if layout is not None and layout.shard % context:
        text = f"must divide the {layout.shard} ranks of parallel.shard; use a divisor"
        yield Problem("parallel.llm.context", context, text, ("parallel.shard",))
        return
    data_parallel = layout.data_parallel // context if layout else 1
    chunk = data_parallel * training.microbatch_size
    size = training.global_batch_size
    if size % chunk:
        ranks = "LLM data-parallel ranks" if is_disaggregated else "data-parallel ranks"
        ranks = f"{ranks} / parallel.llm.context" if context > 1 else ranks
        nearest_sizes = " or ".join(
            str(n) for n in (size // chunk * chunk, -(-size // chunk) * chunk) if n
        )
        text = (
            f"must be a multiple of {ranks} x microbatch_size = {data_parallel} x "
            f"{training.microbatch_size} = {chunk}; use {nearest_sizes}"
        )
        depends_on = ("training.microbatch_size", "parallel.llm.context", *keys)
        yield Problem("training.global_batch_size", size, text, depends_on)
    tokens = training.microbatch_size * training.sequence_length
    if parallel.sequence_parallel and tokens % unit_sizes(parallel, "llm")["tensor"]:
        text = (
            f"microbatch_size x sequence_length = {tokens} is not a multiple of "
            "parallel.tensor; change one of the three values"
        )
        also = ("training.microbatch_size", "parallel.tensor")
        yield Problem("training.sequence_length", training.sequence_length, text, also)
    if parallel.backend == "nccl" and training.device == "cpu":
        text = 'requires CUDA, but training.device is "cpu"; use "auto"'
        yield Problem("parallel.backend", "nccl", text, ("training.device",))


def _check_optimizer(recipe: Recipe) -> Problems:
    optimizer = recipe.optimizer
    steps = recipe.training.steps
    warmup = optimizer.warmup_steps
    decay = round(optimizer.decay_fraction * steps) if optimizer.lr_schedule == "wsd" else 0
    if recipe.training.epochs is None and warmup + decay > steps:
        with_decay = f" + decay of {decay} steps" if decay else ""
        text = (
            f"warmup{with_decay} is longer than training.steps = {steps}; use at most "
            f"{steps - decay}"
        )
        depends_on = ("training.steps", "optimizer.decay_fraction", "optimizer.lr_schedule")
        yield Problem("optimizer.warmup_steps", warmup, text, depends_on)
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        text = "each beta must be >= 0 and < 1; typical values are [0.9, 0.95]"
        yield Problem("optimizer.betas", optimizer.betas, text)
    key = "training.parameter_dtype"
    narrow = recipe.training.parameter_dtype == "bfloat16"
    if narrow and recipe.training.dtype != "bfloat16":
        text = (
            'requires training.dtype = "bfloat16", because float32 compute cannot restore '
            "the precision; set both keys"
        )
        yield Problem(key, "bfloat16", text, ("training.dtype",))
    if not narrow and not optimizer.stochastic_rounding:
        text = f'has no effect without {key} = "bfloat16"; set that key or remove this one'
        yield Problem("optimizer.stochastic_rounding", False, text, (key,))
    if optimizer_entry(optimizer, is_narrow=narrow) is None:
        storage = (
            (key, recipe.training.parameter_dtype),
            ("optimizer.state_dtype", optimizer.state_dtype),
            ("optimizer.offload", optimizer.offload),
        )
        used, value = next(pair for pair in storage if pair[1] not in ("float32", False))
        text = 'the extension "low_precision" is not installed'
        if find_entry("optimizers", f"{LOW_PRECISION_PREFIX}adamw") is not None:
            text = (
                f'is not supported with optimizer "{optimizer.name}"; use optimizer.name = "adamw"'
            )
        yield Problem(used, value, text, ("optimizer.name",))


def _check_memory_limit(recipe: Recipe) -> Problems:
    limit = recipe.activation_checkpoint.memory_limit
    try:
        limit_bytes(limit, 0)
    except ValueError as error:
        yield Problem("activation_checkpoint.memory_limit", limit, str(error))


def _check_metrics(recipe: Recipe) -> Problems:
    metrics = recipe.metrics
    steps = recipe.training.steps
    step = metrics.profile_step
    if step > steps and recipe.training.epochs is None:
        text = f"is after the last step, training.steps = {steps}; use an earlier step"
        yield Problem("metrics.profile_step", step, text, ("training.steps",))
    elif step and find_entry("hooks", "diagnostics") is None:
        text = 'the extension "reports" is not installed; set it to 0'
        yield Problem("metrics.profile_step", step, text)
    if metrics.artifacts and metrics.wandb == "disabled":
        text = 'requires Weights & Biases; set metrics.wandb to "online" or "offline"'
        yield Problem("metrics.artifacts", metrics.artifacts, text, ("metrics.wandb",))
    if "checkpoints" in metrics.artifacts and recipe.checkpoint.staging_dir is not None:
        text = (
            'cannot contain "checkpoints" with checkpoint.staging_dir, because no node has a '
            "complete checkpoint; remove it"
        )
        related = ("checkpoint.staging_dir",)
        yield Problem("metrics.artifacts", metrics.artifacts, text, related)
