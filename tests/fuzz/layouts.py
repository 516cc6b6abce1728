"""Random layouts of a model: all recipe keys that determine where and when tasks are computed.

A layout is first drawn so that it matches its number of ranks. `perturbed` then invalidates some of
them, which must give an error message.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

Table = dict[str, Any]

INTERLEAVED = (
    "separated", "separated", "searched", "searched", "1f1b", "interleaved_1f1b", "gpipe",
    "zero_bubble", "megatron", "megatron_balanced", "csv",
)  # fmt: skip
DISAGGREGATED = ("separated", "1f1b", "interleaved_1f1b", "gpipe", "zero_bubble")
LLM_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
SIZES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Shape:
    """Properties that a layout must match: the modules, the batch and the number of ranks."""

    layers: dict[str, int]
    """Layers by module, in the order of the model."""
    batch: int
    """Sequences per step."""
    world: int
    experts: int = 0
    """Experts per layer of the LLM."""

    @property
    def encoders(self) -> list[str]:
        return [name for name in self.layers if name not in ("llm", "generator")]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def draw_layout(rng: Random, shape: Shape) -> Table:
    """Draw [parallel], [activation_checkpoint] and keys of [data] and [training]."""
    placements, weights = ["interleaved"], [4]
    if shape.encoders:
        placements, weights = [*placements, "colocated"], [*weights, 5]
    if 1 < len(shape.layers) <= shape.world:
        placements, weights = [*placements, "disaggregated"], [*weights, 4]
    placement = rng.choices(placements, weights)[0]
    draw = {"interleaved": _interleaved, "colocated": _colocated, "disaggregated": _disaggregated}
    parallel, data_parallel = draw[placement](rng, shape)
    if placement != "interleaved" or rng.random() < 0.3:
        parallel["placement"] = placement
    _tensor_keys(rng, parallel)
    for name in (*shape.encoders, "generator"):
        if name in shape.layers and rng.random() < 0.4:
            table = parallel.setdefault(name, {})
            table["sub_microbatch_images"] = rng.choice((1, 1, 2, 3, 8))
    if rng.random() < 0.1:
        parallel["replan_threshold"] = rng.choice((0.01, 0.2))
    layout: Table = {"parallel": parallel}
    per_rank = shape.batch // data_parallel
    sizes = [size for size in divisors(per_rank) if size <= 2 or rng.random() < 0.2]
    layout["training"] = {"microbatch_size": rng.choice(sizes)}
    if rng.random() < 0.3:
        layout["data"] = {"reorder": rng.choice(("intra", "inter", "both"))}
    if (checkpointing := _recompute(rng, shape)) is not None:
        layout["activation_checkpoint"] = checkpointing
    is_single_stage = placement == "interleaved" and parallel.get("pipeline", 1) == 1
    separate = Random(repr(layout))  # a separate generator keeps older draws unchanged
    if (
        is_single_stage
        and parallel.get("llm", {}).get("context", 1) == 1
        and separate.random() < 0.6
    ):
        layout.setdefault("data", {})["balance"] = "images"
    values = ("auto", "auto", "none")
    defaults = {"reorder": separate.choice(values), "balance": separate.choice(values)}
    layout["data"] = defaults | layout.get("data", {})
    _dynamic_context(separate, layout)
    return layout


def _split(rng: Random, ranks: int, pipelines: int, batch: int) -> dict[str, int]:
    """Draw parallelism degrees whose product is `ranks`, and which divide the batch."""
    while True:
        pipeline = _middle(rng, [d for d in divisors(ranks) if d <= pipelines])
        remaining = ranks // pipeline
        tensor = rng.choice([d for d in divisors(remaining) if d <= 4]) if rng.random() < 0.6 else 1
        replicate = rng.choice(divisors(remaining // tensor))
        shard = remaining // tensor // replicate
        if batch % (replicate * shard) == 0:
            break
    return {"pipeline": pipeline, "replicate": replicate, "shard": shard, "tensor": tensor}


def _middle(rng: Random, sizes: list[int]) -> int:
    """Choose a size, with a preference for sizes between the minimum and the maximum."""
    return rng.choice([*sizes, *sizes[1:-1], *sizes[1:-1]])


def _written(rng: Random, sizes: dict[str, int], free: tuple[str, ...] = ()) -> dict[str, int]:
    """Return the recipe keys of sizes: one of `free` can be -1, and defaults can be omitted."""
    keys = dict(sizes)
    if free and rng.random() < 0.4:
        keys[rng.choice(free)] = -1
    defaults = {"pipeline": 1, "replicate": 1, "shard": -1, "tensor": 1}
    return {k: v for k, v in keys.items() if v != defaults[k] or rng.random() < 0.5}


def _llm_stages(rng: Random, layers: int, pipeline: int, schedule: str) -> int:
    if pipeline == 1 or schedule == "1f1b":
        return 1
    return rng.choice([v for v in (1, 1, 2, 2, 3) if v * pipeline <= layers] or [1])


def _interleaved(rng: Random, shape: Shape) -> tuple[Table, int]:
    schedule = rng.choice(INTERLEAVED)
    if schedule == "csv" and list(shape.layers) != ["llm"]:
        schedule = "separated"  # a CSV schedule requires a fixed number of images per microbatch
    max_stages = min(shape.layers.values())
    if schedule == "megatron":
        max_stages = shape.layers["llm"]
    elif schedule not in ("separated", "searched", "csv"):
        max_stages = sum(shape.layers.values())
    sizes = _split(rng, shape.world, max_stages, shape.batch)
    parallel: Table = {"schedule": schedule, **_written(rng, sizes, ("replicate", "shard"))}
    pipeline = sizes["pipeline"]
    virtual = _llm_stages(rng, min(max_stages, shape.layers["llm"]), pipeline, schedule)
    if virtual > 1:
        parallel["virtual_stages"] = virtual
    if schedule in ("separated", "searched", "csv") and pipeline > 1:
        for name, layers in shape.layers.items():
            if rng.random() < 0.35:
                segments = rng.choice([s for s in (1, 2, 3) if s * pipeline <= layers] or [1])
                parallel.setdefault(name, {})["segments"] = segments
    if schedule == "searched":
        parallel["search"] = _search(rng)
    if pipeline == 1:
        parallel |= _fsdp(rng)
    parallel |= _experts(rng, shape, sizes)
    context = _context(rng, parallel, sizes["shard"])
    return parallel, sizes["replicate"] * sizes["shard"] // context


def _fsdp(rng: Random) -> Table:
    """Draw when FSDP2 gathers and reduces, without a pipeline."""
    keys: Table = {}
    if rng.random() < 0.3:
        keys["reshard_after_forward"] = rng.choice(("always", "never"))
    if keys.get("reshard_after_forward") != "never" and rng.random() < 0.5:
        keys["gradient_reduction"] = "microbatch"
    return keys


def _experts(rng: Random, shape: Shape, sizes: dict[str, int]) -> Table:
    if not shape.experts or sizes["tensor"] > 1 or rng.random() < 0.3:
        return {}
    return {"expert": _middle(rng, [d for d in divisors(sizes["shard"]) if shape.experts % d == 0])}


def _context(rng: Random, parallel: Table, shard: int) -> int:
    """Draw the number of context-parallel ranks and set it in `parallel`."""
    if shard == 1 or rng.random() < 0.5:
        return 1
    context = _middle(rng, divisors(shard))
    parallel.setdefault("llm", {})["context"] = context
    return context


def _dynamic_context(rng: Random, layout: Table) -> None:
    """Draw whether groups of context-parallel ranks follow the sample lengths."""
    llm = layout["parallel"].get("llm", {})
    is_supported = llm.get("context") in (2, 4, 8) and layout["training"]["microbatch_size"] == 1
    if is_supported and rng.random() < 0.5:
        llm["dynamic_context"] = True


def _search(rng: Random) -> Table:
    search: Table = {"evaluations": rng.choice((20, 60))}
    if rng.random() < 0.1:
        search["evaluations"] = 1  # the original order
    if rng.random() < 0.4:
        search["stages"] = rng.choice(("megatron", "balanced", "auto"))
    if rng.random() < 0.8:
        search["background"] = False
    if rng.random() < 0.2:
        search |= {"workers": 2, "time_fraction": 0.5}
    return search


def _colocated(rng: Random, shape: Shape) -> tuple[Table, int]:
    llm_schedule = rng.choice(LLM_SCHEDULES)
    sizes = _split(rng, shape.world, shape.layers["llm"], shape.batch)
    parallel: Table = {"schedule": "optimus", **_written(rng, sizes, ("replicate", "shard"))}
    if llm_schedule != "interleaved_1f1b" or rng.random() < 0.3:
        parallel["llm_schedule"] = llm_schedule
    pipeline, tensor = sizes["pipeline"], sizes["tensor"]
    virtual = _llm_stages(rng, shape.layers["llm"], pipeline, llm_schedule)
    if virtual > 1:
        parallel["virtual_stages"] = virtual
    if rng.random() < 0.3:
        parallel["bubble_granularity"] = "coarse"
    split = rng.choice(divisors(tensor))
    splits = {name: rng.choice((split, rng.choice(divisors(tensor)))) for name in shape.encoders}
    for name in shape.encoders:
        if encoder_keys := _colocated_encoder(rng, shape, name, sizes, splits[name]):
            parallel[name] = encoder_keys
    if len(set(splits.values())) == 1 and tensor > 1 and rng.random() < 0.4:
        parallel["tp_comm_fraction"] = 0.2
    if rng.random() < 0.1:
        parallel["auto_sizes"] = True
    context = _context(rng, parallel, sizes["shard"])
    return parallel, sizes["replicate"] * sizes["shard"] // context


def _colocated_encoder(
    rng: Random, shape: Shape, name: str, llm: dict[str, int], split: int
) -> dict[str, int]:
    """Draw the sizes of an encoder.

    Args:
        llm: Sizes of the LLM.
        split: Tensor-parallel ranks of the encoder.
    """
    keys: dict[str, int] = {}
    fits = [d for d in divisors(llm["pipeline"]) if d <= shape.layers[name]]
    stages = 1 if rng.random() < 0.4 else rng.choice(fits)
    if stages > 1 or rng.random() < 0.3:
        keys["pipeline"] = stages
    if split != llm["tensor"] or rng.random() < 0.3:
        keys["tensor"] = split
    remaining = shape.world // (stages * split)
    if rng.random() < 0.8:
        replicate = rng.choice(divisors(remaining))
        keys |= {"replicate": replicate, "shard": remaining // replicate}
        inferred = rng.choice((None, None, "replicate", "shard"))
        if inferred is not None and rng.random() < 0.5:
            keys[inferred] = -1
        elif inferred is not None:
            del keys[inferred]
    if llm["pipeline"] > 1 and rng.random() < 0.3:
        keys["segments"] = rng.choice([s for s in (1, 2) if s * stages <= shape.layers[name]])
    return keys


def _disaggregated(rng: Random, shape: Shape) -> tuple[Table, int]:
    schedule = rng.choice(DISAGGREGATED)
    names = list(shape.layers)
    ranks = dict.fromkeys(names, 1)
    for _ in range(shape.world - len(names)):
        ranks[rng.choice(names)] += 1
    parallel: Table = {"schedule": schedule}
    data_parallel = 1
    for name in names:
        batch = shape.batch if name == "llm" else ranks[name]
        sizes = _split(rng, ranks[name], shape.layers[name], batch * ranks[name])
        if name == "llm":
            sizes = _split(rng, ranks[name], shape.layers[name], shape.batch)
            parallel |= _written(rng, sizes)
            parallel["shard"] = sizes["shard"]
            data_parallel = sizes["replicate"] * sizes["shard"]
            virtual = _llm_stages(rng, shape.layers[name], sizes["pipeline"], schedule)
            if virtual > 1:
                parallel["virtual_stages"] = virtual
            continue
        keys = {key: size for key, size in sizes.items() if size > 1 or rng.random() < 0.2}
        if schedule == "separated" and sizes["pipeline"] > 1 and rng.random() < 0.3:
            fits = [s for s in (1, 2) if s * sizes["pipeline"] <= shape.layers[name]]
            keys["segments"] = rng.choice(fits)
        if keys:
            parallel[name] = keys
    if rng.random() < 0.2:  # one size uses the remaining ranks
        name = rng.choice(names)
        table = parallel if name == "llm" else parallel.setdefault(name, {})
        table["shard"] = -1
    if rng.random() < 0.08:
        parallel["auto_sizes"] = True
    return parallel, data_parallel


def _tensor_keys(rng: Random, parallel: Table) -> None:
    if parallel.get("tensor", 1) == 1 or rng.random() < 0.4:
        return
    parallel["sequence_parallel"] = True
    zero_bubble = "zero_bubble" in (parallel["schedule"], parallel.get("llm_schedule"))
    if zero_bubble or "tp_comm_fraction" in parallel or rng.random() < 0.5:
        return
    parallel["async_tensor_parallel"] = True
    if rng.random() < 0.6:
        parallel["async_tensor_backend"] = rng.choice(("ring", "collective"))
    parallel["async_tensor_chunks"] = rng.choice((1, 2, 3))


def _recompute(rng: Random, shape: Shape) -> Table | None:
    modes = ("none", "selective", "full", "auto")
    if rng.random() < 0.5:
        return None
    table: Table = {"mode": rng.choices(modes, (2, 3, 3, 3))[0]}
    if rng.random() < 0.3:
        table["modules"] = {rng.choice(list(shape.layers)): rng.choice(modes)}
    if "auto" in (table["mode"], *table.get("modules", {}).values()):
        table["memory_limit"] = rng.choice(("85%", "1 GiB", "8 MiB", "3 MiB"))
    return table


def perturbed(rng: Random, layout: Table, shape: Shape) -> Table:
    """Change one or two keys to arbitrary values."""
    parallel = layout["parallel"]
    for _ in range(rng.choice((1, 1, 2))):
        size = rng.choice((1, 1, 2, 2, 3, 4, -1))
        key = rng.choice(SIZES)
        kind = rng.randrange(9)
        if kind == 0:
            parallel[key] = max(1, size) if key in ("pipeline", "tensor") else size
        elif kind in (1, 2):
            name = rng.choice([*shape.layers])
            value = max(1, size) if key in ("pipeline", "tensor") else size
            parallel.setdefault(name, {})[key] = value
        elif kind == 3:
            parallel["schedule"] = rng.choice((*INTERLEAVED[:-1], "optimus"))
        elif kind == 4:
            parallel["placement"] = rng.choice(("interleaved", "colocated", "disaggregated"))
        elif kind == 5:
            parallel["virtual_stages"] = rng.choice((1, 2, 3))
        elif kind == 6:
            name = rng.choice([*shape.layers])
            parallel.setdefault(name, {})["segments"] = rng.choice((1, 2, 3))
        elif kind == 7:
            parallel.setdefault("llm", {})["context"] = rng.choice((2, 2, 3, 4))
        else:
            key, value = rng.choice(
                (
                    ("sequence_parallel", True),
                    ("async_tensor_parallel", True),
                    ("reshard_after_forward", "always"),
                    ("gradient_reduction", "microbatch"),
                    ("tp_comm_fraction", 0.2),
                    ("bubble_granularity", "coarse"),
                    ("auto_sizes", True),
                    ("replan_threshold", 0.05),
                    ("backend", "nccl"),
                    ("async_tensor_backend", "symmetric_memory"),
                )
            )
            parallel[key] = value
    return layout
