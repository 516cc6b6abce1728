"""PipeWeaver partitioner (section 5): segments and sub-microbatches of a pipeline.

A sub-microbatch of a module has the smallest number of images whose throughput is close to the
best. A module passes the ranks once per segment. Its number of segments is proportional to the
latency of a sub-microbatch, so stages of all modules have similar durations and can replace each
other in the pipeline:

    latency    vision 4 ms, LLM 12 ms           ->   segments   vision 1, LLM 3
    stages     | v | l1 | l2 | l3 |  on each rank    about 4 ms / ranks each

`separated_layout` distributes layers over stages, also if they do not divide evenly. N images form
ceil(N / B) sub-microbatches of even size.

The paper leaves some choices open. Latencies are those of forward and backward of an average
sub-microbatch of the data. The number of segments is limited by the number of layers and by
`MAX_SEGMENTS`, because smaller stages of a fast encoder would mostly transfer data. Times come
from the cost model, whose profile can be measured (scripts/calibrate.py). Measuring at the start of
a run would make layouts depend on noise, and with them checkpoint speed and the last bits of
losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.common.batch import MicrobatchMeta, split_evenly
from torchmm.common.layers import ModuleDescription
from torchmm.costs.sizes import (
    Array,
    TaskSizes,
    encoder_sizes,
    generator_sizes,
    llm_sizes,
    text_tokens,
)

EFFICIENT_FRACTION = 0.95
"""Minimum throughput of a sub-microbatch, relative to the best size."""
MAX_SEGMENTS = 8
MAX_AVERAGED = 512
"""Maximum number of sub-microbatches whose latencies are averaged."""


@dataclass(frozen=True)
class Partition:
    """Result of the partitioner, by module name.

    Attributes:
        sub_microbatch_images: Images per sub-microbatch of encoders and generators with images.
        segments: Number of segments of every module.
        latency_ms: Mean time of forward and backward of a sub-microbatch through all layers.
    """

    sub_microbatch_images: dict[str, int]
    segments: dict[str, int]
    latency_ms: dict[str, float]


def partition_modules(
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    ranks: int,
    *,
    fixed_images: Mapping[str, int] | None = None,
    fixed_segments: Mapping[str, int] | None = None,
) -> Partition:
    """Return the sizes of sub-microbatches and the numbers of segments.

    Args:
        modules: Encoders, LLM and generator, unsharded.
        microbatches: Typical microbatches.
        model: Cost model of the modules in the run.
        ranks: Number of pipeline ranks.
        fixed_images: Fixed images of sub-microbatches, by module.
        fixed_segments: Fixed numbers of segments, by module.

    Raises:
        ValueError: No microbatches, or a module has fewer layers than ranks.
    """
    if not microbatches:
        raise ValueError("no microbatches to partition modules for")
    images: dict[str, int] = {}
    latency_ms: dict[str, float] = {}
    for module in modules:
        if len(module.layers) < ranks:
            raise ValueError(
                f"{module.name}: {len(module.layers)} layers for {ranks} pipeline ranks; use fewer"
            )
        sub_microbatches = _sub_microbatches(module, microbatches, model, dict(fixed_images or {}))
        if sub_microbatches is None:
            continue
        size, sizes = sub_microbatches
        if module.kind != "llm":
            images[module.name] = size
        latency_ms[module.name] = float(_times_ms(module, sizes, model).mean())
    max_segments = {
        module.name: min(len(module.layers) // ranks, MAX_SEGMENTS) for module in modules
    }
    counts = segment_counts(latency_ms, max_segments) | dict(fixed_segments or {})
    return Partition(images, {m.name: counts.get(m.name, 1) for m in modules}, latency_ms)


def segment_counts(
    latency_ms: Mapping[str, float], max_counts: Mapping[str, int]
) -> dict[str, int]:
    """Return floor(T / T of the fastest module), at least 1 and at most `max_counts`, by module."""
    fastest_ms = min((ms for ms in latency_ms.values() if ms > 0), default=0.0)
    if fastest_ms == 0:
        return dict.fromkeys(latency_ms, 1)
    return {
        name: max(1, min(int(ms / fastest_ms + 1e-9), max_counts[name]))
        for name, ms in latency_ms.items()
    }


def smallest_efficient_size(times_ms: Sequence[float]) -> int:
    """Return the smallest size whose throughput is close to the best one.

    Args:
        times_ms: Times of 1, 2, 3, ... images.

    Raises:
        ValueError: No times, or one is not positive.
    """
    if len(times_ms) == 0 or min(times_ms) <= 0:
        raise ValueError(f"times {list(times_ms)}: must be positive times for 1, 2, 3, ... images")
    rates = [(index + 1) / ms for index, ms in enumerate(times_ms)]
    return 1 + next(i for i, rate in enumerate(rates) if rate >= EFFICIENT_FRACTION * max(rates))


def _sub_microbatches(
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    fixed_images: Mapping[str, int],
) -> tuple[int, TaskSizes] | None:
    """Return the images of a sub-microbatch and the sizes of all sub-microbatches of the data.

    Returns None if the data have no images for the module.
    """
    if module.kind == "llm":
        targets = [text_tokens(meta) for meta in microbatches]
        return 1, llm_sizes(microbatches, targets, padding=True)
    images: list[list[Any]] = [list(meta.generated) for meta in microbatches]
    sizes_of: Callable[[list[list[Any]]], TaskSizes] = partial(generator_sizes, padding=True)
    if module.kind == "encoder":
        images = [meta.images_of_encoder(module.name) for meta in microbatches]
        sizes_of = partial(encoder_sizes, module)
    pool = [image for group in images for image in group]
    if not pool:
        return None
    size = fixed_images.get(module.name)
    if not size:
        # 1, 2, 3, ... images of about the average size
        max_images = max(map(len, images))
        examples = [
            pool[index] for index in np.linspace(0, len(pool) - 1, max_images).round().astype(int)
        ]
        prefixes = [examples[:count] for count in range(1, max_images + 1)]
        size = smallest_efficient_size(_times_ms(module, sizes_of(prefixes), model).tolist())
    groups = [
        group[r.start : r.stop]
        for group in images
        if group
        for r in split_evenly(len(group), ceil(len(group) / size))
    ]
    return size, sizes_of(groups[:MAX_AVERAGED])


def _times_ms(module: ModuleDescription, sizes: TaskSizes, model: CostModel) -> Array:
    """Return the times of forward and backward of all layers of a module, by task."""
    arrives = module.kind != "encoder"
    costs = model.stage_costs(module, 0, len(module.layers), sizes, arrives)
    return costs.forward.total_ms + costs.backward.total_ms
