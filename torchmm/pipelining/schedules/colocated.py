"""Encoders on the LLM's ranks with pipelines of their own (Optimus §3.1, §4.1).

Where the LLM's pipeline has P ranks, an encoder's has P' <= P: P / P' pipelines of it, each with
all of the encoder, run side by side on blocks of consecutive ranks, and each microbatch goes
through one of them. In the layout these are replicas of the encoder's stages. A stage can be
*sliced* into several on the same rank, so that its work can be placed in smaller pieces.

The backbone, LLM and generators, is cut and ordered as if there were no encoders.

Where encoders are split over fewer tensor-parallel ranks than the LLM, a rank of the plan is one of
their groups, and the LLM's group is several ranks of the plan: its *mirrors*, which run the same
tasks together (rank p, mirror c is rank p * mirrors + c of the plan, as `EncoderWork` numbers
devices). What an encoder hands to the LLM goes to all mirrors, and one gradient comes back; under
sequence parallelism, each mirror's slice.
Rejected: one plan per tensor-parallel rank, in which work of the others could not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchmm.common.module_names import LLM
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.orders import needed_action
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.layouts import (
    Cut,
    ModuleLayers,
    balanced_cuts,
    build_layout,
    megatron_layout,
)


def colocated_layout(
    modules: Sequence[ModuleLayers],
    ranks: int,
    virtual_stages: int = 1,
    *,
    pipelines: Mapping[str, int] | None = None,
    slices: Mapping[str, int] | None = None,
    mirrors: int = 1,
) -> StageLayout:
    """Backbone as in `megatron_layout` without encoders, encoders in pipelines of their own.

    Args:
        modules: encoders, LLM, generators.
        ranks: pipeline ranks of the LLM.
        virtual_stages: LLM stages per rank.
        pipelines: by encoder: pipeline ranks of each of its pipelines, a divisor of `ranks`; 1
            where none is given: every rank has the whole encoder.
        slices: by encoder: stages per rank of its pipelines; 1 where none is given.
        mirrors: the LLM's tensor-parallel size in those of the encoders.

    Raises:
        ValueError: the sizes do not divide, an encoder has fewer layers than stages; what
            `megatron_layout` and `build_layout` raise.
    """
    encoders = [module for module in modules if module.kind == "encoder"]
    given = {**dict(pipelines or {}), **dict(slices or {})}
    if unknown := sorted(set(given) - {encoder.name for encoder in encoders}):
        raise ValueError(f"sizes of {unknown}, which are no encoders")
    cuts: dict[str, list[Cut]] = {}
    count = 0
    for encoder in encoders:
        size = (pipelines or {}).get(encoder.name, 1)
        pieces = (slices or {}).get(encoder.name, 1)
        if size < 1 or ranks % size:
            raise ValueError(
                f"{encoder.name}: pipelines of {size} ranks on the {ranks} of the LLM; give a "
                f"divisor of {ranks}"
            )
        if not 1 <= pieces * size <= len(encoder.costs):
            raise ValueError(
                f"{encoder.name}: {len(encoder.costs)} layers for {size} ranks x {pieces} slices; "
                "use fewer of either"
            )
        for index, layers in enumerate(balanced_cuts(encoder.costs_with_ends, size * pieces)):
            blocks = range(index // pieces, ranks, size)
            own = tuple(rank * mirrors + mirror for rank in blocks for mirror in range(mirrors))
            cut = Cut(layers, own, segment=index % pieces, virtual_stage=count + index)
            cuts.setdefault(encoder.name, []).append(cut)
        count += size * pieces
    backbone = modules[len(encoders) :]
    for stage in megatron_layout(backbone, ranks, virtual_stages).stages:
        own = tuple(rank * mirrors for rank in stage.ranks)
        cut = Cut(stage.stop - stage.start, own, stage.segment, count + stage.virtual_stage)
        cuts.setdefault(stage.module, []).append(cut)
    return _mirrored(build_layout(modules, cuts), mirrors)


def _mirrored(layout: StageLayout, mirrors: int) -> StageLayout:
    """The layout with this many mirrors of the backbone, one after the other."""
    if mirrors == 1:
        return layout
    first = next(stage.index for stage in layout.stages if stage.module == LLM)
    backbone = layout.stages[first:]
    stages = list(layout.stages)
    edges = list(layout.edges)
    for mirror in range(1, mirrors):
        offset = mirror * len(backbone)
        stages += (
            replace(
                stage,
                index=stage.index + offset,
                ranks=tuple(rank + mirror for rank in stage.ranks),
                virtual_stage=stage.virtual_stage + offset,
                tied_to=stage.tied_to + offset if stage.tied_to >= 0 else -1,
                mirror=mirror,
            )
            for stage in backbone
        )
        edges += (
            (s if s < first else s + offset, d + offset) for s, d in layout.edges if d >= first
        )
    return StageLayout(tuple(stages), tuple(sorted(edges)), layout.sub_microbatched)


def encoder_names(layout: StageLayout) -> list[str]:
    """Modules before the LLM.

    Raises:
        ValueError: there is no LLM.
    """
    names = list(dict.fromkeys(stage.module for stage in layout.stages))
    if LLM not in names:
        raise ValueError(f"modules {names}: none is called {LLM!r}")
    return names[: names.index(LLM)]


def backbone_order(
    graph: StageGraph,
    schedule: Callable[[StageGraph], ComputeOrder],
    sequence: Sequence[int] | None = None,
) -> ComputeOrder:
    """The backbone's actions as a schedule orders them where there are no encoders; of mirrors,
    those of the first, by pipeline rank.

    Args:
        graph: of the whole step.
        schedule: of the backbone's graph.
        sequence: the microbatches in the order in which the backbone takes them; None: as they are.

    Raises:
        ValueError: `sequence` has not each microbatch once; what `schedule` raises.
    """
    taken = list(range(graph.microbatches) if sequence is None else sequence)
    if sorted(taken) != list(range(graph.microbatches)):
        raise ValueError(
            f"sequence {taken}: give each of the {graph.microbatches} microbatches once"
        )
    backbone, offset = _backbone(graph, taken)
    rows: list[tuple[Action, ...]] = []
    for row in schedule(backbone):
        actions = (a._replace(stage=a.stage + offset, microbatch=taken[a.microbatch]) for a in row)
        rows.append(tuple(new for a in actions if (new := needed_action(graph, a)) is not None))
    return tuple(rows)


def _backbone(graph: StageGraph, taken: Sequence[int]) -> tuple[StageGraph, int]:
    """The graph without encoders, microbatches in the order taken; number of encoder stages."""
    layout = graph.layout
    encoders = set(encoder_names(graph.layout))
    offset = next(stage.index for stage in layout.stages if stage.module not in encoders)
    kept = [stage for stage in layout.stages[offset:] if not stage.mirror]
    first = min(stage.virtual_stage for stage in kept)
    stages = tuple(
        replace(
            stage,
            index=stage.index - offset,
            ranks=tuple(rank // layout.mirrors for rank in stage.ranks),
            virtual_stage=stage.virtual_stage - first if stage.virtual_stage >= 0 else -1,
            tied_to=-1,
            trainable=True,  # or backwards that only encoders need would be missing
        )
        for stage in kept
    )
    ends = range(offset, offset + len(kept))
    edges = tuple((s - offset, d - offset) for s, d in layout.edges if s in ends and d in ends)
    parts = layout.sub_microbatched - encoders
    counts = {name: tuple(graph.sub_microbatches[name][i] for i in taken) for name in parts}
    return StageGraph(StageLayout(stages, edges, parts), graph.microbatches, counts), offset


def spread_replicas(graph: StageGraph) -> StageGraph:
    """The graph with the tasks of replicated modules dealt to their replicas in turn.

    For steps of forwards only, where no replica has anything else to do than another.
    """
    counts = {s.module: len(s.ranks) for s in graph.layout.stages if len(s.ranks) > 1}
    first = {stage.module: stage.index for stage in reversed(graph.layout.stages)}
    replica: dict[tuple[str, int, int], int] = {}
    for module, count in counts.items():
        tasks = [
            (microbatch, part)
            for microbatch in range(graph.microbatches)
            for part in range(graph.parts(first[module], microbatch))
        ]
        replica |= {(module, *task): index % count for index, task in enumerate(tasks)}
    return replace(graph, replica=replica)
