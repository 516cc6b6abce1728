"""Stage layouts: split modules into pipeline stages.

- Megatron-LM: full encoders before the first stage of the LLM, on rank 0.
- Megatron-LM balanced (Optimus, appendix B): all layers in one pipeline, split by cost.
- Modality-separated segments (PipeWeaver, section 5): each module is split over all ranks.

For example, an encoder of 6 layers and an LLM of 4 layers that cost twice as much, on 4 ranks:

    rank                 0              1          2          3
    megatron             enc 0-5 LLM 0  LLM 1      LLM 2      LLM 3
    megatron_balanced    enc 0-2        enc 3-5    LLM 0-1    LLM 2-3
    separated            enc 0          enc 1      enc 2-3    enc 4-5
                         LLM 0          LLM 1      LLM 2      LLM 3

A stage has at least one layer. Use fewer segments or ranks for a module with fewer layers than
stages: an empty stage would cost two transfers per task.

Balanced splits use the dynamic program of Optimus (appendix B), a simple form of that of Alpa.
F(l, m) is the minimum of the maximum stage cost if the first l layers form m stages. It is the
minimum over j < l of max(F(j, m - 1), cost of layers j..l). Many splits have the same maximum.
torchmm selects the split with the minimum sum of squares, and then with the largest last stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from torchmm.pipelining.plan.graph import StageLayout, StageSpec

_TIE = 1e-9  # relative tolerance for the rounding of sums


def balanced_split(
    costs: Sequence[float], parts: int, loads: Sequence[float] | None = None
) -> list[int]:
    """Return the number of layers of each part of a balanced split, in O(layers^2 * parts) time.

    Args:
        costs: Cost of each layer in any unit. If all are 0, every layer has cost 1.
        parts: Number of parts, at most the number of layers.
        loads: Additional cost of the rank of each part, in the same unit. Loads are included only
            in the sum of squares, so the maximum part cost is the same with and without them.

    Raises:
        ValueError: There are fewer layers than parts, no parts, or negative costs.
    """
    layers = len(costs)
    if not 1 <= parts <= layers:
        raise ValueError(
            f"{layers} layers cannot be split into {parts} parts of at least one layer"
        )
    if min(costs) < 0:
        raise ValueError(f"negative cost {min(costs)} of a layer")
    if not any(costs):  # the typical microbatch does not use this module
        costs = [1.0] * layers
        loads = None
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    sums = ends[None, :] - ends[:, None]  # costs of layers [row, column)
    sums[np.tril_indices(layers + 1)] = np.inf  # no empty parts
    largest = sums[0]
    for _ in range(parts - 1):
        largest = np.maximum(largest[:, None], sums).min(axis=0)
    allowed = np.where(sums <= largest[layers] * (1 + _TIE), sums, np.inf)
    before = loads or [0.0] * parts
    best = (allowed[0] + before[0]) ** 2
    starts = []
    for load in before[1:]:
        total = best[:, None] + (allowed + load) ** 2
        best = total.min(axis=0)
        starts.append((total <= best * (1 + _TIE)).argmax(axis=0))  # first minimum up to rounding
    sizes, stop = [], layers
    for start in reversed(starts):
        sizes.append(stop - int(start[stop]))
        stop = int(start[stop])
    return [stop, *reversed(sizes)]


@dataclass(frozen=True)
class ModuleLayers:
    """Layers of a module, with the properties that determine its split into stages.

    Attributes:
        name: Name of the module in the recipe.
        kind: Encoders feed the LLM, and the LLM feeds generators.
        costs: Cost of each layer: forward and backward pass of a typical microbatch, in a unit
            that all modules share.
        sub_microbatched: Whether the module supports sub-microbatches.
        trainable: Whether each layer is trainable. Defaults to True for all layers.
        embedding_cost: Cost of the modules before the layers, such as the embedding.
        head_cost: Cost of the modules after the layers, such as the LM head.
        embedding_trainable: Whether the modules before the layers are trainable.
        head_trainable: Whether the modules after the layers are trainable.
        tied: Whether the input and output embeddings share their weight.

    Raises:
        ValueError: There are no layers, or `trainable` has a different length.
    """

    name: str
    kind: Literal["encoder", "llm", "generator"]
    costs: tuple[float, ...]
    sub_microbatched: bool = False
    trainable: tuple[bool, ...] | None = None
    embedding_cost: float = 0.0
    head_cost: float = 0.0
    embedding_trainable: bool = True
    head_trainable: bool = True
    tied: bool = False

    def __post_init__(self) -> None:
        if not self.costs:
            raise ValueError(f"{self.name} has no layers")
        if self.trainable is not None and len(self.trainable) != len(self.costs):
            raise ValueError(
                f"{self.name}: {len(self.trainable)} trainable flags for {len(self.costs)} layers"
            )

    @property
    def costs_with_ends(self) -> list[float]:
        """Layer costs, with `embedding_cost` in the first and `head_cost` in the last layer."""
        costs = list(self.costs)
        costs[0] += self.embedding_cost
        costs[-1] += self.head_cost
        return costs

    def is_trainable(self, start: int, stop: int) -> bool:
        """Return True if the stage with layers [start, stop) has trainable parameters."""
        layers = self.trainable or (True,) * len(self.costs)
        return (
            any(layers[start:stop])
            or (start == 0 and self.embedding_trainable)
            or (stop == len(layers) and self.head_trainable)
        )


class StageSplit(NamedTuple):
    """The next `layers` layers of a module, which are one stage."""

    layers: int
    ranks: tuple[int, ...]
    """Rank of each replica."""
    segment: int = 0
    virtual_stage: int = -1
    """Classic schedules merge stages with the same number. -1 for a separate virtual stage."""


def build_layout(
    modules: Sequence[ModuleLayers], splits: Mapping[str, Sequence[StageSplit]]
) -> StageLayout:
    """Build a layout from the splits of all modules.

    The last stage of each encoder feeds the first stage of the LLM. The last stage of the LLM feeds
    the first stage of each generator.

    Args:
        modules: Encoders, one LLM, and generators, in this order.
        splits: Stages of each module.

    Raises:
        ValueError: The modules have another order, the stages do not cover all layers exactly, a
            stage is empty, or both tied embeddings are in different stages on one rank.
    """
    names = [module.name for module in modules]
    llm_index = _find_llm(modules)
    if sorted(splits) != sorted(names):
        raise ValueError(f"splits are set for {sorted(splits)}, but the modules are {names}")
    stages: list[StageSpec] = []
    edges: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    for module in modules:
        first = len(stages)
        stages += _stages(module, splits[module.name], first)
        ends.append((first, len(stages) - 1))
        edges += pairwise(range(first, len(stages)))
    edges += ((last, ends[llm_index][0]) for _, last in ends[:llm_index])
    edges += ((ends[llm_index][1], first) for first, _ in ends[llm_index + 1 :])
    sub_microbatched = frozenset(m.name for m in modules if m.sub_microbatched)
    return StageLayout(tuple(stages), tuple(sorted(edges)), sub_microbatched)


def _find_llm(modules: Sequence[ModuleLayers]) -> int:
    """Return the index of the LLM."""
    kinds = [module.kind for module in modules]
    ordered = sorted(kinds, key=("encoder", "llm", "generator").index)
    if kinds != ordered or kinds.count("llm") != 1 or len({m.name for m in modules}) < len(modules):
        listed = ", ".join(f"{m.name} ({m.kind})" for m in modules)
        raise ValueError(
            f"modules are {listed or 'none'}; list encoders, one LLM and generators in this "
            "order, with different names"
        )
    return kinds.index("llm")


def _stages(module: ModuleLayers, splits: Sequence[StageSplit], first: int) -> list[StageSpec]:
    sizes = [split.layers for split in splits]
    if sum(sizes) != len(module.costs) or min(sizes, default=0) < 1:
        raise ValueError(
            f"{module.name}: stages of {sizes} layers; each stage requires at least one "
            f"layer, and the sum must be {len(module.costs)}"
        )
    last = first + len(splits) - 1
    ties: dict[int, int] = {}
    if module.tied and first != last:
        shared = set(splits[0].ranks) & set(splits[-1].ranks)
        if shared:
            raise ValueError(
                f"{module.name}: its input and output embeddings are tied, but stages {first} "
                f"and {last}, which contain them, are different stages on rank {min(shared)}; "
                "use more pipeline ranks, one stage per rank, or untie them"
            )
        if (
            module.embedding_trainable or module.head_trainable
        ):  # frozen embeddings need no reduction
            ties = {first: last, last: first}
    stages, start = [], 0
    for index, split in enumerate(splits, start=first):
        stop = start + split.layers
        stages.append(
            StageSpec(
                index=index,
                module=module.name,
                start=start,
                stop=stop,
                ranks=split.ranks,
                segment=split.segment,
                virtual_stage=split.virtual_stage,
                trainable=module.is_trainable(start, stop),
                tied_to=ties.get(index, -1),
            )
        )
        start = stop
    return stages


def separated_layout(
    modules: Sequence[ModuleLayers], ranks: int, segments: Mapping[str, int] | None = None
) -> StageLayout:
    """Split each module into segments with one stage per rank.

    Each split minimizes the maximum stage cost of the module. Ties are resolved in favor of ranks
    that preceding modules load least.

    Args:
        modules: Encoders, one LLM, and generators, in this order.
        ranks: Number of pipeline ranks.
        segments: Number of segments of each module. Defaults to 1.

    Raises:
        ValueError: A module has fewer layers than stages. See also `build_layout`.
    """
    segment_counts = dict(segments or {})
    unknown = set(segment_counts) - {m.name for m in modules}
    if unknown:
        raise ValueError(f"segments of {sorted(unknown)}, which are not modules")
    loads = [0.0] * ranks
    splits: dict[str, list[StageSplit]] = {}
    for module in modules:
        count = segment_counts.get(module.name, 1)
        _check_count(module.name, len(module.costs), ranks, count, "segments")
        costs = module.costs_with_ends
        sizes = balanced_split(costs, ranks * count, loads * count)
        splits[module.name] = [
            StageSplit(size, (i % ranks,), segment=i // ranks) for i, size in enumerate(sizes)
        ]
        start = 0
        for i, size in enumerate(sizes):
            loads[i % ranks] += sum(costs[start : start + size])
            start += size
    return build_layout(modules, splits)


def megatron_layout(
    modules: Sequence[ModuleLayers], ranks: int, virtual_stages: int = 1
) -> StageLayout:
    """Place encoders before the first LLM stage and generators after the last LLM stage.

    LLM stages have equal numbers of layers. Remaining layers are added to the stages after the
    first one, which shares its rank with the encoders.

    Args:
        modules: Encoders, one LLM, and generators, in this order.
        ranks: Number of pipeline ranks.
        virtual_stages: Number of LLM stages per rank.

    Raises:
        ValueError: The LLM has fewer layers than stages. See also `build_layout`.
    """
    llm_index = _find_llm(modules)
    count = ranks * virtual_stages
    layers = len(modules[llm_index].costs)
    _check_count(modules[llm_index].name, layers, ranks, virtual_stages, "virtual stages per rank")
    size, larger = divmod(layers, count)
    splits: dict[str, list[StageSplit]] = {}
    for position, module in enumerate(modules):
        if position == llm_index:
            splits[module.name] = [
                StageSplit(size + (1 <= i <= larger), (i % ranks,), i // ranks, i)
                for i in range(count)
            ]
        else:
            stage = 0 if position < llm_index else count - 1
            splits[module.name] = [
                StageSplit(len(module.costs), (stage % ranks,), stage // ranks, virtual_stage=stage)
            ]
    return build_layout(modules, splits)


def megatron_balanced_layout(
    modules: Sequence[ModuleLayers], ranks: int, virtual_stages: int = 1
) -> StageLayout:
    """Split the layers of all modules in one pipeline into virtual stages of similar cost.

    A virtual stage can contain the end of one module and the start of the next module. These are
    two stages that classic schedules merge. Several encoders follow each other in the pipeline.

    Args:
        modules: Encoders, one LLM, and generators, in this order.
        ranks: Number of pipeline ranks.
        virtual_stages: Number of virtual stages per rank.

    Raises:
        ValueError: There are fewer layers than virtual stages. See also `build_layout`.
    """
    layer_modules = [module.name for module in modules for _ in module.costs]
    costs = [cost for module in modules for cost in module.costs_with_ends]
    _check_count("all modules", len(costs), ranks, virtual_stages, "virtual stages per rank")
    splits: dict[str, list[StageSplit]] = {module.name: [] for module in modules}
    start = 0
    for index, size in enumerate(balanced_split(costs, ranks * virtual_stages)):
        stage_modules = layer_modules[start : start + size]
        for name in dict.fromkeys(stage_modules):
            splits[name].append(
                StageSplit(
                    stage_modules.count(name), (index % ranks,), index // ranks, virtual_stage=index
                )
            )
        start += size
    return build_layout(modules, splits)


def _check_count(subject: str, layers: int, ranks: int, per_rank: int, name: str) -> None:
    if ranks < 1 or per_rank < 1:
        raise ValueError(
            f"{subject}: {ranks} pipeline ranks and {per_rank} {name} must be at least 1"
        )
    if layers < ranks * per_rank:
        raise ValueError(
            f"{subject}: {layers} layers are fewer than {ranks} pipeline ranks x {per_rank} "
            f"{name}; use fewer ranks or stages"
        )
