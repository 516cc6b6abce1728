"""How finely modules are divided for an interleaved pipeline: PipeWeaver's partitioner (§5).

For every module the size of its sub-microbatches: the smallest that still computes nearly as
efficiently as the best one. Then how often it passes the ranks: segments in proportion to how long
a sub-microbatch takes, so that stages of all modules take about equally long and may replace each
other in the pipeline. Layers are spread over these stages by `separated_layout`, which handles
counts that do not divide; a batch's sub-microbatches follow from its images, ceil(N / B), evenly.

What the paper leaves open is decided so: latencies are those of a forward with its backward, of a
mean sub-microbatch of the data; a module has no more segments than its layers can fill, and never
more than `MOST_SEGMENTS`, beyond which stages of a fast encoder's size would be all transfers.
Efficiencies come from the cost model, whose profile may be measured (scripts/calibrate.py).
Rejected: measuring modules when a run begins, which makes layouts, and so checkpoints' speed and
losses' last bits, depend on the noise of that minute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.common.batch import MicrobatchMeta, even_ranges
from torchmm.common.layers import ModuleDescription
from torchmm.costs.sizes import (
    Array,
    TaskSizes,
    encoder_sizes,
    generator_sizes,
    llm_sizes,
    text_tokens,
)

EFFICIENT = 0.95
"""Share of the best efficiency that a sub-microbatch has to reach."""
MOST_SEGMENTS = 8
MOST_SHOWN = 512
"""Sub-microbatches over which latencies are averaged, at most."""


@dataclass(frozen=True)
class Partition:
    """What the partitioner decides; by module name.

    Attributes:
        sub_microbatch_images: of encoders and generators that the data have images for.
        segments: of all modules.
        latency_ms: of a forward with its backward of a mean sub-microbatch, all layers.
    """

    sub_microbatch_images: dict[str, int]
    segments: dict[str, int]
    latency_ms: dict[str, float]


def partition(
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    ranks: int,
    *,
    images_given: Mapping[str, int] | None = None,
    segments_given: Mapping[str, int] | None = None,
) -> Partition:
    """Sizes of sub-microbatches and numbers of segments.

    Args:
        modules: encoders, LLM and generator, whole.
        microbatches: typical ones.
        model: costs of the device, and how modules run.
        ranks: pipeline ranks.
        images_given, segments_given: what is decided already, by module.

    Raises:
        ValueError: no microbatches, or a module has fewer layers than ranks.
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
        found = _sub_microbatches(module, microbatches, model, dict(images_given or {}))
        if found is None:
            continue
        size, sizes = found
        if module.kind != "llm":
            images[module.name] = size
        latency_ms[module.name] = float(_times_ms(module, sizes, model).mean())
    most = {module.name: min(len(module.layers) // ranks, MOST_SEGMENTS) for module in modules}
    counts = segment_counts(latency_ms, most) | dict(segments_given or {})
    return Partition(images, {m.name: counts.get(m.name, 1) for m in modules}, latency_ms)


def segment_counts(latency_ms: Mapping[str, float], most: Mapping[str, int]) -> dict[str, int]:
    """floor(T / T of the fastest module), at least 1 and at most `most`."""
    fastest_ms = min((ms for ms in latency_ms.values() if ms > 0), default=0.0)
    if fastest_ms == 0:
        return dict.fromkeys(latency_ms, 1)
    return {
        name: max(1, min(int(ms / fastest_ms + 1e-9), most[name]))
        for name, ms in latency_ms.items()
    }


def smallest_efficient(times_ms: Sequence[float]) -> int:
    """The smallest size whose throughput is near the best.

    Args:
        times_ms: of 1, 2, 3, ... images.

    Raises:
        ValueError: no times, or one is not positive.
    """
    if len(times_ms) == 0 or min(times_ms) <= 0:
        raise ValueError(f"times {list(times_ms)}: give positive ones of 1, 2, 3, ... images")
    rates = [(index + 1) / ms for index, ms in enumerate(times_ms)]
    return 1 + next(i for i, rate in enumerate(rates) if rate >= EFFICIENT * max(rates))


def _sub_microbatches(
    module: ModuleDescription,
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    given: Mapping[str, int],
) -> tuple[int, TaskSizes] | None:
    """Images of a sub-microbatch, and sizes of those of the data; None if there are none."""
    if module.kind == "llm":
        targets = [text_tokens(meta) for meta in microbatches]
        return 1, llm_sizes(microbatches, targets, padding=True)
    shown: list[list[Any]] = [list(meta.generated) for meta in microbatches]
    sizes_of: Callable[[list[list[Any]]], TaskSizes] = partial(generator_sizes, padding=True)
    if module.kind == "encoder":
        shown = [meta.images_read_by(module.name) for meta in microbatches]
        sizes_of = partial(encoder_sizes, module)
    pool = [image for own in shown for image in own]
    if not pool:
        return None
    most = max(map(len, shown))
    size = given.get(module.name) or smallest_efficient(
        _times_ms(module, sizes_of(_prefixes(pool, most)), model).tolist()
    )
    groups = [
        own[r.start : r.stop]
        for own in shown
        if own
        for r in even_ranges(len(own), ceil(len(own) / size))
    ]
    return size, sizes_of(groups[:MOST_SHOWN])


def _prefixes(pool: list, most: int) -> list[list]:
    """1 to `most` images that together are about as large as the mean."""
    chosen = [pool[index] for index in np.linspace(0, len(pool) - 1, most).round().astype(int)]
    return [chosen[:count] for count in range(1, most + 1)]


def _times_ms(module: ModuleDescription, sizes: TaskSizes, model: CostModel) -> Array:
    """Forward and backward of all layers of a module, by task."""
    arrives = module.kind != "encoder"
    costs = model.stage_costs(module, 0, len(module.layers), sizes, arrives)
    return costs.forward.total_ms + costs.backward.total_ms
