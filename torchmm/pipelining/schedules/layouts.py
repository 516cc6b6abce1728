"""Cutting modality modules into stages: the published layouts, and cuts given by the user.

- Megatron-LM: whole encoders in front of the LLM's first stage, on rank 0.
- Megatron-LM balanced (Optimus, appendix B): all layers in one chain, cut for equal costs.
- Modality-separated segments (PipeWeaver §5): every module over all ranks, on its own.

A stage has at least one layer. Rejected: empty stages for modules with fewer layers than stages; a
hop that computes nothing still costs two transfers per task, and two stages that begin at layer 0
would both claim what stands before the layers. Such a module takes fewer segments or ranks.

Equal parts come from the dynamic programming of Optimus (appendix B), a simple form of Alpa's: F(l,
m), the least possible largest part when the first l layers form m parts, is the minimum over j < l
of max(F(j, m - 1), cost of layers j..l). Many cuts share the least maximum, and the paper does not
say which it takes; here it is the one with the least sum of squares, which evens out the other
parts too, and among equal ones the one whose last parts are largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from torchmm.pipelining.plan.graph import StageLayout, StageSpec

_TIE = 1e-9  # relative; sums of floats in different orders differ by less


def balanced_cuts(
    costs: Sequence[float], parts: int, loads: Sequence[float] | None = None
) -> list[int]:
    """Number of layers of each part, in order; at least 1.

    O(layers^2 * parts).

    Args:
        costs: by layer, in any unit, not negative. If all are 0, layers are counted.
        parts: how many; at most as many as layers.
        loads: what each part's rank has to do besides, in the same unit. Counts in the sum of
            squares only: the largest part is the least possible with and without.

    Raises:
        ValueError: there are fewer layers than parts, no parts, or a negative cost.
    """
    layers = len(costs)
    if not 1 <= parts <= layers:
        raise ValueError(
            f"{layers} layers cannot be split into {parts} parts of at least one layer"
        )
    if min(costs) < 0:
        raise ValueError(f"negative cost {min(costs)} of a layer")
    if not any(costs):  # a module that the typical microbatch does not use
        costs = [1.0] * layers
        loads = None
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    sums = ends[None, :] - ends[:, None]  # of layers [row, column)
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
    """A modality module as far as cutting it needs to know.

    Attributes:
        name: as in the recipe.
        kind: encoders feed the LLM, the LLM feeds generators.
        costs: by layer: forward and backward of a typical microbatch, in a unit that all modules
            share.
        sub_microbatched: whether it may process a microbatch in any number of parts.
        trainable: by layer.
        pre_cost, post_cost: of what comes before and after the layers (embedding, head).
        pre_trainable, post_trainable: whether any of that is trained.
        tied: whether a weight before the layers and one after them are the same.

    Raises:
        ValueError: no layers, or the flags do not fit.
    """

    name: str
    kind: Literal["encoder", "llm", "generator"]
    costs: tuple[float, ...]
    sub_microbatched: bool = False
    trainable: tuple[bool, ...] | None = None
    """None: all."""
    pre_cost: float = 0.0
    post_cost: float = 0.0
    pre_trainable: bool = True
    post_trainable: bool = True
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
        """Costs by layer, those before and after the layers added to the first and last."""
        costs = list(self.costs)
        costs[0] += self.pre_cost
        costs[-1] += self.post_cost
        return costs

    def trains(self, start: int, stop: int) -> bool:
        """Whether anything in the stage with layers [start, stop) is trained."""
        layers = self.trainable or (True,) * len(self.costs)
        return (
            any(layers[start:stop])
            or (start == 0 and self.pre_trainable)
            or (stop == len(layers) and self.post_trainable)
        )


class Cut(NamedTuple):
    """One stage of a module: its next `layers` layers."""

    layers: int
    ranks: tuple[int, ...]
    """One per replica."""
    segment: int = 0
    virtual_stage: int = -1
    """Stages of the same number form one unit of a classic schedule; -1: a unit of its own."""


def build_layout(modules: Sequence[ModuleLayers], cuts: Mapping[str, Sequence[Cut]]) -> StageLayout:
    """Stages from cuts given for every module, in the order of the modules.

    The last stage of each encoder feeds the first of the LLM, whose last feeds the generators'
    first ones.

    Args:
        modules: encoders, one LLM, generators, in this order.
        cuts: by module.

    Raises:
        ValueError: the modules are others or in another order, the cuts do not cover each module's
            layers exactly, a stage is empty, or both ends of a tied module would be different
            stages on one rank.
    """
    names = [module.name for module in modules]
    trunk = _llm(modules)
    if sorted(cuts) != sorted(names):
        raise ValueError(f"splits are set for {sorted(cuts)}, but the modules are {names}")
    stages: list[StageSpec] = []
    edges: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    for module in modules:
        first = len(stages)
        stages += _stages(module, cuts[module.name], first)
        ends.append((first, len(stages) - 1))
        edges += pairwise(range(first, len(stages)))
    edges += ((last, ends[trunk][0]) for _, last in ends[:trunk])
    edges += ((ends[trunk][1], first) for first, _ in ends[trunk + 1 :])
    parts = frozenset(m.name for m in modules if m.sub_microbatched)
    return StageLayout(tuple(stages), tuple(sorted(edges)), parts)


def _llm(modules: Sequence[ModuleLayers]) -> int:
    """Position of the LLM."""
    kinds = [module.kind for module in modules]
    ordered = sorted(kinds, key=("encoder", "llm", "generator").index)
    if kinds != ordered or kinds.count("llm") != 1 or len({m.name for m in modules}) < len(modules):
        found = ", ".join(f"{m.name} ({m.kind})" for m in modules)
        raise ValueError(
            f"modules are {found or 'none'}; list encoders, one LLM and generators in this "
            "order, with different names"
        )
    return kinds.index("llm")


def _stages(module: ModuleLayers, cuts: Sequence[Cut], first: int) -> list[StageSpec]:
    sizes = [cut.layers for cut in cuts]
    if sum(sizes) != len(module.costs) or min(sizes, default=0) < 1:
        raise ValueError(
            f"{module.name}: stages of {sizes} layers; each stage requires at least one "
            f"layer, and the sum must be {len(module.costs)}"
        )
    last = first + len(cuts) - 1
    ties: dict[int, int] = {}
    if module.tied and first != last:
        shared = set(cuts[0].ranks) & set(cuts[-1].ranks)
        if shared:
            raise ValueError(
                f"{module.name}: its input and output embeddings are tied, but stages {first} "
                f"and {last}, which contain them, are different stages on rank {min(shared)}; "
                "use more pipeline ranks, one stage per rank, or untie them"
            )
        if module.pre_trainable or module.post_trainable:  # else no gradients are added up
            ties = {first: last, last: first}
    stages, start = [], 0
    for index, cut in enumerate(cuts, start=first):
        stop = start + cut.layers
        stages.append(
            StageSpec(
                index=index,
                module=module.name,
                start=start,
                stop=stop,
                ranks=cut.ranks,
                segment=cut.segment,
                virtual_stage=cut.virtual_stage,
                trainable=module.trains(start, stop),
                tied_to=ties.get(index, -1),
            )
        )
        start = stop
    return stages


def separated_layout(
    modules: Sequence[ModuleLayers], ranks: int, segments: Mapping[str, int] | None = None
) -> StageLayout:
    """Every module in segments of one stage per rank.

    Each module is cut so that its largest stage is as small as possible; what remains open goes
    to the ranks that modules before it load least.

    Args:
        ranks: pipeline ranks.
        segments: by module; 1 where none is given.

    Raises:
        ValueError: a module has fewer layers than stages; what `build_layout` raises.
    """
    given = dict(segments or {})
    unknown = set(given) - {m.name for m in modules}
    if unknown:
        raise ValueError(f"segments of {sorted(unknown)}, which are not modules")
    loads = [0.0] * ranks
    cuts: dict[str, list[Cut]] = {}
    for module in modules:
        count = given.get(module.name, 1)
        _check_count(module.name, len(module.costs), ranks, count, "segments")
        costs = module.costs_with_ends
        sizes = balanced_cuts(costs, ranks * count, loads * count)
        cuts[module.name] = [
            Cut(size, (i % ranks,), segment=i // ranks) for i, size in enumerate(sizes)
        ]
        start = 0
        for i, size in enumerate(sizes):
            loads[i % ranks] += sum(costs[start : start + size])
            start += size
    return build_layout(modules, cuts)


def megatron_layout(
    modules: Sequence[ModuleLayers], ranks: int, virtual_stages: int = 1
) -> StageLayout:
    """Encoders in front of the LLM's first stage, a generator after its last.

    The LLM's layers are spread evenly, whatever they cost. If they do not divide, stages after
    the first, which has the encoders to carry, get one more.

    Args:
        ranks: pipeline ranks.
        virtual_stages: LLM stages per rank.

    Raises:
        ValueError: the LLM has fewer layers than stages; what `build_layout` raises.
    """
    trunk = _llm(modules)
    count = ranks * virtual_stages
    layers = len(modules[trunk].costs)
    _check_count(modules[trunk].name, layers, ranks, virtual_stages, "virtual stages per rank")
    size, larger = divmod(layers, count)
    cuts: dict[str, list[Cut]] = {}
    for position, module in enumerate(modules):
        if position == trunk:
            cuts[module.name] = [
                Cut(size + (1 <= i <= larger), (i % ranks,), i // ranks, i) for i in range(count)
            ]
        else:
            stage = 0 if position < trunk else count - 1
            cuts[module.name] = [
                Cut(len(module.costs), (stage % ranks,), stage // ranks, virtual_stage=stage)
            ]
    return build_layout(modules, cuts)


def megatron_balanced_layout(
    modules: Sequence[ModuleLayers], ranks: int, virtual_stages: int = 1
) -> StageLayout:
    """All modules' layers in one chain, cut into equally costly virtual stages.

    A virtual stage may hold the end of one module and the start of the next: two stages that
    classic schedules run as one. The paper leaves out models with several encoders, which do not
    form a chain; here one follows the other, which is also a chain, only a longer one.

    Args:
        ranks: pipeline ranks.
        virtual_stages: per rank.

    Raises:
        ValueError: fewer layers than virtual stages; what `build_layout` raises.
    """
    owners = [module.name for module in modules for _ in module.costs]
    costs = [cost for module in modules for cost in module.costs_with_ends]
    _check_count("all modules", len(costs), ranks, virtual_stages, "virtual stages per rank")
    cuts: dict[str, list[Cut]] = {module.name: [] for module in modules}
    start = 0
    for index, size in enumerate(balanced_cuts(costs, ranks * virtual_stages)):
        inside = owners[start : start + size]
        for name in dict.fromkeys(inside):
            cuts[name].append(
                Cut(inside.count(name), (index % ranks,), index // ranks, virtual_stage=index)
            )
        start += size
    return build_layout(modules, cuts)


def _check_count(what: str, layers: int, ranks: int, per_rank: int, name: str) -> None:
    if ranks < 1 or per_rank < 1:
        raise ValueError(f"{what}: {ranks} pipeline ranks and {per_rank} {name} must be at least 1")
    if layers < ranks * per_rank:
        raise ValueError(
            f"{what}: {layers} layers are fewer than {ranks} pipeline ranks x {per_rank} "
            f"{name}; use fewer ranks or stages"
        )
