"""Candidates of the search for parallelism degrees, as changes of a recipe.

    for plan in root_plans("fsdp", recipe, 64, profile, sample): apply_plan(recipe, plan)

A method is a way to divide the model:

    fsdp            no pipeline: FSDP2, HSDP, tensor, context and expert parallelism
    chain           all layers as one chain in a pipeline
    separated       every module in separate segments on all pipeline ranks
    colocated       encoders in the bubbles of the LLM
    disaggregated   every module on separate ranks (see `disaggregated`)

`root_plans` yields the roots of all methods but the last: the product of parallelism degrees,
with the first schedule and without recomputation. `neighbors` yields plans that differ from a fast
plan in one choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import get_args

from torchmm.balance.disttrain.orchestration.unit_costs import TENSOR_SIZES, fitting_tensor_sizes
from torchmm.balance.pipeweaver.partitioner import MAX_SEGMENTS
from torchmm.balance.recipe_simulation.step_simulator import StepSample
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.costs.operators import DeviceProfile
from torchmm.recipe.check import find_problems
from torchmm.recipe.mesh_sizes import AXES
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import LlmSchedule
from torchmm.recipe.section import Section
from torchmm.recipe.training_section import limit_bytes

METHODS = ("fsdp", "chain", "separated", "colocated", "disaggregated")
MICROBATCH_SIZES = (1, 2, 4, 8)
CONTEXT_SIZES = EXPERT_SIZES = (2, 4, 8)
CONTEXT_TOKENS = 8192
"""Sequence length from which context parallelism is tried."""
PIPELINES = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
"""Pipeline sizes that are tried in addition to divisors of the number of LLM layers."""
VIRTUAL_STAGES = (2, 4)
TUNED = "auto"
RECOMPUTE_MODES = ("none", TUNED, "selective", "full")
"""Modes of activation checkpointing to try, fastest first. "auto" is never slower than another mode
that fits. If it is not supported, fixed modes are tried."""
MIN_USED_FRACTION = 1 / 2
"""Minimum fraction of the devices that a plan uses."""
IMAGES_AT_ONCE = (4, 2, 1)
FIRST_SEGMENTS = ((2, 4), (4, 4), (2, 1))
"""Segments per rank and images per sub-microbatch that are tried first with searched schedules. Few
images are faster for long images, such as the generated videos of T2V-S of PipeWeaver."""
LAYERS_PER_STAGE = (2, 4)
"""Layers per stage of colocated encoders that are tried in addition to 1."""
CHAIN_SCHEDULES = (
    ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zero_bubble", 1), ("megatron", 1),
    ("megatron", 2), ("gpipe", 1),
)  # fmt: skip
"""Schedules with stages per rank that are tried for a chain in addition to 1F1B."""

FIRST_SCHEDULES = {"separated": "separated", "colocated": "optimus"}
"""Schedules that are tried first, by method; 1F1B for other methods."""
RECIPE_PARALLEL_KEYS = (
    "schedule",
    "virtual_stages",
    "expert",
    "sequence_parallel",
    "gradient_reduction",
)
"""Keys of [parallel] in plans of unchanged recipes, in addition to parallelism degrees."""
REDUCTION = "parallel.gradient_reduction"
DATA_LABELS = {"data.reorder": "reordered", "data.balance": "balanced"}

Value = int | str | bool | float


@dataclass(frozen=True)
class CandidatePlan:
    """Candidate of the search.

    Attributes:
        method: One of `METHODS`.
        devices: Number of devices it uses.
        changes: Values by key of the recipe, such as "parallel.vision.tensor".
    """

    method: str
    devices: int
    changes: Mapping[str, Value]

    @property
    def text(self) -> str:
        """Changes in one line. It identifies the plan."""
        parts = [f"{key}={value}" for key, value in sorted(self.changes.items())]
        return f"{self.method} {self.devices} {' '.join(parts)}"

    def size(self, key: str) -> int:
        """Return the value of a key of [parallel] or [parallel.NAME], 1 if it is not changed."""
        return int(self.changes.get(f"parallel.{key}", 1))

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return str(self.changes["parallel.schedule"])

    @property
    def recompute(self) -> str:
        """Mode of activation checkpointing."""
        return str(self.changes["activation_checkpoint.mode"])

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return int(self.changes["training.microbatch_size"])

    @property
    def data_parallel(self) -> int:
        """Number of LLM replicas and shards."""
        return self.size("replicate") * self.size("shard")

    @property
    def data_ranks(self) -> int:
        """Number of LLM ranks that read different sequences."""
        return self.data_parallel // self.size("llm.context")

    def with_changes(self, **changes: Value | None) -> CandidatePlan:
        """Return the plan with changed values. "__" in a name is a dot, and None removes a key."""
        updated = dict(self.changes)
        for name, value in changes.items():
            key = name.replace("__", ".")
            if value is None:
                updated.pop(key, None)
            else:
                updated[key] = value
        return CandidatePlan(self.method, self.devices, updated)


def strip_parallelism(recipe: Recipe) -> Recipe:
    """Return the recipe without parallelism degrees, for one rank per pipeline stage and module.

    Recomputation modes of single modules are removed, because plans choose the mode of all modules.
    Other keys of [parallel] are not changed, unless they conflict with the keys that plans change.
    """
    table = recipe.parallel.model_dump(exclude_none=True)
    dropped = {*AXES, "segments", "context", "dynamic_context", "sub_microbatch_images"}
    for name in recipe.parallel.modules:
        table[name] = {key: value for key, value in table[name].items() if key not in dropped}
    table |= dict.fromkeys((*AXES, "virtual_stages", "expert"), 1)
    table |= {"placement": "interleaved", "schedule": "1f1b", "auto_sizes": False}
    table |= {"async_tensor_parallel": False, "async_tensor_backend": "auto"}
    table["tp_comm_fraction"] = 0.0
    table["gradient_reduction"] = "step"
    if table["reshard_after_forward"] == "always":
        table["reshard_after_forward"] = "default"
    updates: dict[str, Section] = {"parallel": ParallelConfig.model_validate(table)}
    updates["activation_checkpoint"] = recipe.activation_checkpoint.model_copy(
        update={"modules": {}}
    )
    return recipe.model_copy(update=updates)


def apply_plan(recipe: Recipe, plan: CandidatePlan) -> Recipe:
    """Return a plain recipe with the changes of a plan."""
    parallel = recipe.parallel.model_dump(exclude_none=True)
    sections: dict[str, dict[str, Value]] = {"simulation": {"gpus": plan.devices}}
    for key, value in plan.changes.items():
        section, _, name = key.partition(".")
        module, _, module_key = name.partition(".")
        if section != "parallel":
            sections.setdefault(section, {})[name] = value
        elif module_key:
            parallel.setdefault(module, {})[module_key] = value
        else:
            parallel[name] = value
    sections.pop("activation_checkpoint", None)
    updates: dict[str, Section] = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()
    }
    updates["parallel"] = ParallelConfig.model_validate(parallel)
    planned = recipe.model_copy(update=updates)
    return with_recompute(planned, plan.recompute)


def with_recompute(recipe: Recipe, mode: str) -> Recipe:
    """Return the recipe with another recomputation mode."""
    section = recipe.activation_checkpoint.model_copy(update={"mode": mode})
    return recipe.model_copy(update={"activation_checkpoint": section})


def with_memory_limit(recipe: Recipe, device_bytes: float) -> Recipe:
    """Return the recipe with a limit for tuned layers of at most the memory that plans may use.

    Args:
        recipe: Recipe to change.
        device_bytes: Memory of a device.
    """
    checkpointing = recipe.activation_checkpoint
    if (
        limit_bytes(checkpointing.memory_limit, device_bytes)
        <= USABLE_MEMORY_FRACTION * device_bytes
    ):
        return recipe
    section = checkpointing.model_copy(update={"memory_limit": f"{USABLE_MEMORY_FRACTION:.0%}"})
    return recipe.model_copy(update={"activation_checkpoint": section})


def root_plans(
    method: str,
    recipe: Recipe,
    devices: int,
    profile: DeviceProfile,
    sample: StepSample,
    *,
    exact: bool = False,
) -> Iterator[CandidatePlan]:
    """Yield plans whose modules share all ranks, with the first schedule and recomputation mode.

    Args:
        method: Any of `METHODS` but "disaggregated".
        recipe: Recipe of the run.
        devices: Number of devices in the cluster.
        profile: Profile of one device.
        sample: Model of the recipe.
        exact: Whether a plan must use all devices.
    """
    per_node = profile.device.devices_per_node
    llm = next(module for module in sample.modules if module.name == LLM)
    tensors = fitting_tensor_sizes(llm, [n for n in TENSOR_SIZES if n <= min(devices, per_node)])
    pipelines = (1,) if method == "fsdp" else _pipeline_sizes(method, recipe, devices, sample)
    experts = (1, *_expert_sizes(llm, per_node)) if method in ("fsdp", "chain") else (1,)
    contexts = _context_sizes(recipe)
    batch = recipe.training.global_batch_size
    recipe_size = recipe.training.microbatch_size
    max_size = max(recipe_size, *(MICROBATCH_SIZES if method == "fsdp" else MICROBATCH_SIZES[:2]))
    sizes = [size for size in microbatch_sizes(recipe) if size <= max_size]
    for tensor, pipeline, context, expert, size in product(
        tensors, pipelines, contexts, experts, sizes
    ):
        ranks = tensor * pipeline
        data = _data_parallel(devices // ranks, batch // size, max(context, expert), context)
        used = data * ranks
        if not data or used < MIN_USED_FRACTION * devices or (exact and used < devices):
            continue
        for shard in _shard_sizes(method, data, tensor, per_node):
            if shard % context or shard % expert:
                continue
            changes: dict[str, Value] = {
                "parallel.tensor": tensor,
                "parallel.pipeline": pipeline,
                "parallel.replicate": data // shard,
                "parallel.shard": shard,
                "parallel.schedule": FIRST_SCHEDULES.get(method, "1f1b"),
                "parallel.sequence_parallel": tensor > 1,
                "training.microbatch_size": size,
                "activation_checkpoint.mode": RECOMPUTE_MODES[0],
            }
            if context > 1:
                changes["parallel.llm.context"] = context
            if expert > 1:
                changes["parallel.expert"] = expert
            if method == "colocated":
                changes["parallel.placement"] = "colocated"
            if method != "fsdp" or data > context:
                changes |= _data_assignment(method, recipe, sample, context)
            yield CandidatePlan(method, used, changes)
            if method == "fsdp" and batch > data // context * size:
                yield CandidatePlan(method, used, {**changes, REDUCTION: "microbatch"})


def microbatch_sizes(recipe: Recipe) -> list[int]:
    """Return the numbers of sequences per microbatch that divide the global batch."""
    sizes = {recipe.training.microbatch_size, *MICROBATCH_SIZES}
    return sorted(size for size in sizes if recipe.training.global_batch_size % size == 0)


def _data_assignment(
    method: str, recipe: Recipe, sample: StepSample, context: int
) -> dict[str, Value]:
    """Return the assignment of sequences and images to data-parallel ranks."""
    changes: dict[str, Value] = {"data.reorder": _reorder_values(method, recipe)[0]}
    data = recipe.data.model_copy(update={"balance": "images"})
    has_images = any(module.kind != "llm" for module in sample.modules)
    is_plain = method == "fsdp" and context == 1 and has_images
    if is_plain and not find_problems(recipe.model_copy(update={"data": data}), 1):
        changes["data.balance"] = "images"
    return changes


def _pipeline_sizes(
    method: str, recipe: Recipe, devices: int, sample: StepSample
) -> tuple[int, ...]:
    counts = {module.name: len(module.layers) for module in sample.modules}
    llm = counts[LLM]
    max_pipeline = min(counts.values()) if method == "separated" else llm
    divisors = [n for n in range(2, llm + 1) if llm % n == 0]
    candidates = sorted({recipe.parallel.pipeline, *PIPELINES, *divisors})
    return tuple(n for n in candidates if 1 < n <= min(max_pipeline, devices, PIPELINES[-1]))


def _expert_sizes(llm: ModuleDescription, per_node: int) -> list[int]:
    experts = max((layer.experts for layer in llm.layers), default=0)
    return [n for n in EXPERT_SIZES if n <= per_node and experts and experts % n == 0]


def _context_sizes(recipe: Recipe) -> tuple[int, ...]:
    context = recipe.parallel.context
    if context == 1 and recipe.training.sequence_length < CONTEXT_TOKENS:
        return (1,)
    return tuple(sorted({1, context, *CONTEXT_SIZES}))


def _data_parallel(max_ranks: int, microbatches: int, multiple: int, context: int) -> int:
    """Return the largest number of data-parallel ranks that divides the batch, or 0."""
    for count in range(max_ranks, 0, -1):
        if count % multiple == 0 and microbatches % (count // context) == 0:
            return count
    return 0


def _shard_sizes(method: str, data: int, tensor: int, per_node: int) -> list[int]:
    """Return sizes of shard groups: within a node, then larger, then none.

    Without a pipeline, layers are all-gathered in every microbatch. All sizes are therefore tried,
    each at least twice the previous size. Pipelines all-gather once per step, so few sizes are
    enough.
    """
    divisors = [n for n in range(1, data + 1) if data % n == 0]
    sizes = [max(n for n in divisors if n == 1 or n * tensor <= per_node)]
    while larger := next((n for n in divisors if n >= 2 * sizes[-1]), None):
        sizes.append(larger)
    if method != "fsdp":
        sizes = sizes[:2]
    return list(dict.fromkeys((*sizes, data, 1)))


def _reorder_values(method: str, recipe: Recipe) -> tuple[str, ...]:
    """Return the values of `data.reorder` to try, the value that is usually fastest first.

    Without a pipeline, the microbatch order of a rank does not matter. Streamed samples cannot be
    reordered, because their sizes are unknown in advance.
    """
    if any(source.streaming for source in recipe.data.sources):
        return ("none",)
    return ("intra", "none") if method == "fsdp" else ("both", "intra", "none")


def neighbors(plan: CandidatePlan, recipe: Recipe, sample: StepSample) -> Iterator[CandidatePlan]:
    """Yield plans that differ from a fast plan in the schedule, stages, or images per
    sub-microbatch.

    Args:
        plan: Plan of modules that share all ranks.
        recipe: Recipe of the run.
        sample: Model of the recipe.
    """
    if "data.reorder" in plan.changes:
        for value in _reorder_values(plan.method, recipe):
            if value != plan.changes["data.reorder"]:
                yield plan.with_changes(data__reorder=value)
    if plan.changes.get("data.balance", "none") != "none":
        yield plan.with_changes(data__balance="none")
    layers = {module.name: len(module.layers) for module in sample.modules}
    if plan.method == "chain" and plan.schedule == "1f1b":
        for name, stages in CHAIN_SCHEDULES:
            if stages * plan.size("pipeline") <= sum(layers.values()):
                yield plan.with_changes(parallel__schedule=name, parallel__virtual_stages=stages)
    elif plan.method == "separated":
        yield from _segment_neighbors(plan, sample)
    elif plan.method == "colocated":
        yield from _colocated_neighbors(plan, layers)


def _segment_neighbors(plan: CandidatePlan, sample: StepSample) -> Iterator[CandidatePlan]:
    """Yield the searched schedule, then other numbers of segments and images.

    All numbers are set explicitly, so that simulations and runs do not choose them again.
    """
    pipeline = plan.size("pipeline")
    limits: dict[str, int] = {}
    values: dict[str, int] = {}
    for module in sample.modules:
        key = f"parallel.{module.name}.segments"
        limits[key] = min(len(module.layers) // pipeline, MAX_SEGMENTS)
        values[key] = int(plan.changes.get(key, 1))
        if module.kind != "llm":
            key = f"parallel.{module.name}.sub_microbatch_images"
            values[key] = int(plan.changes.get(key, IMAGES_AT_ONCE[0]))
            limits[key] = max(1, *(pack.module_image_count(module.name) for pack in sample.packs))
    if plan.schedule != "searched":
        for count, images in FIRST_SEGMENTS:
            changed = {
                key: min(count if key.endswith("segments") else images, limits[key])
                for key in values
            }
            if all(changed.values()):
                yield plan.with_changes(parallel__schedule="searched", **changed)
        return
    segments = tuple(key for key in values if key.endswith("segments"))
    groups = (
        [segments, *((key,) for key in values)] if len(segments) > 1 else [(k,) for k in values]
    )
    steps = (lambda n: 2 * n, lambda n: n // 2, lambda n: n + 1, lambda n: n - 1)
    for step, group in product(steps, groups):
        changed = values | {key: step(values[key]) for key in group}
        if all(1 <= changed[key] <= limits[key] for key in group):
            yield plan.with_changes(**changed)


def _colocated_neighbors(plan: CandidatePlan, layers: Mapping[str, int]) -> Iterator[CandidatePlan]:
    """Yield other LLM stages and schedules, then other parallelism degrees of encoders.

    Degrees of all encoders together come first, then those of single encoders.
    """
    for stages in (1, *VIRTUAL_STAGES):
        if stages != plan.size("virtual_stages") and stages * plan.size("pipeline") <= layers[LLM]:
            yield plan.with_changes(parallel__virtual_stages=stages)
    for name in get_args(LlmSchedule):
        if plan.size("virtual_stages") > 1 or name in ("zero_bubble", "searched"):
            yield plan.with_changes(parallel__llm_schedule=name)
    encoders = [name for name in layers if name not in (LLM, GENERATOR)]
    groups = [encoders, *([name] for name in encoders)] if len(encoders) > 1 else [encoders]
    for group in groups:
        for values in _encoder_changes(plan, {name: layers[name] for name in group}):
            changed = {f"parallel.{name}": value for name, value in values.items()}
            yield CandidatePlan(plan.method, plan.devices, {**plan.changes, **changed})


def _encoder_changes(plan: CandidatePlan, layers: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield other values of keys of colocated encoders, such as "vision.tensor".

    Args:
        plan: Plan to change.
        layers: Number of layers by encoder to change.
    """
    pipeline = plan.size("pipeline")
    for count in (n for n in range(1, pipeline + 1) if pipeline % n == 0):
        if count <= min(layers.values()):
            yield {f"{name}.pipeline": count for name in layers}
    for count in (n for n in TENSOR_SIZES if n < plan.size("tensor")):
        yield {f"{name}.tensor": count for name in layers}
    for count in IMAGES_AT_ONCE:
        yield {f"{name}.sub_microbatch_images": count for name in layers}
    for share in LAYERS_PER_STAGE:
        segments = {
            f"{name}.segments": count // plan.size(f"{name}.pipeline") // share
            for name, count in layers.items()
        }
        if all(segments.values()):
            yield segments


def describe_sizes(plan: CandidatePlan) -> str:
    """Return a short description of the parallelism degrees of a plan."""
    names = {
        "TP": plan.size("tensor"),
        "PP": plan.size("pipeline"),
        "CP": plan.size("llm.context"),
        "EP": plan.size("expert"),
    }
    words = [f"{name} {size}" for name, size in names.items() if size > 1]
    words += [f"{plan.size('replicate')} x {plan.size('shard')} data parallel"]
    words += [f"microbatches of {plan.microbatch_size}"]
    for key, value in sorted(plan.changes.items()):
        parts = key.split(".")
        if key in DATA_LABELS and value != "none":
            words.append(f"{DATA_LABELS[key]} {value}")
        if key == REDUCTION and value == "microbatch":
            words.append("gradients per microbatch")
        if len(parts) == 3 and parts[1] != LLM:
            words.append(f"{parts[1]} {parts[2]} {value}")
    return ", ".join(words)


def describe_choices(plan: CandidatePlan, recipe: Recipe) -> str:
    """Return a short description of the values that the search chose for a recipe."""
    stages = plan.size("virtual_stages")
    words = [f"{stages} stages per rank"] if stages > 1 else []
    for key, value in sorted(plan.changes.items()):
        module, _, key_of_module = key.removeprefix("parallel.").partition(".")
        modules = recipe.parallel.modules
        recipe_value = getattr(modules[module], key_of_module, None) if module in modules else None
        if key.startswith("parallel.") and key_of_module and value != recipe_value:
            words.append(f"{module} {key_of_module} {value}")
    return ", ".join(words)
