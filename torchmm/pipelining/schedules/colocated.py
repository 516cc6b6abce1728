"""Colocated placement: encoders on the LLM ranks, with separate pipelines (Optimus 3.1, 4.1).

The LLM pipeline has P ranks. An encoder pipeline has P' <= P ranks, and P / P' of them run on
blocks of consecutive ranks. Each microbatch passes one of these pipelines. In the layout they are
replicas of the encoder stages. A stage can be split into several *slices* on the same rank, so that
the encoder work can be scheduled in smaller units. The backbone (LLM and generators) is split and
scheduled as if there were no encoders.

Mirrors. If encoders have a smaller tensor-parallel size than the LLM, a rank of the plan is a
tensor-parallel group of the encoder. The tensor-parallel group of the LLM then spans several ranks
of the plan, which run the same LLM tasks together: mirror c of pipeline rank p is rank
p * mirrors + c of the plan. Encoder outputs are sent to all mirrors, and the first mirror returns
the gradient. With sequence parallelism, each mirror returns the gradient of its slice.

Encoders can have different tensor-parallel sizes. The smallest common unit is then a rank of the
plan, and an encoder with a larger size has mirrors, too. Mirror c of C sends its outputs to the LLM
mirrors c, C + c, 2 C + c, ..., one of which is its own rank.

    LLM TP 4, vision TP 2, audio TP 1   rank of the plan    0   1   2   3
                                        LLM, mirror         0   1   2   3
                                        vision              [replica 0] [replica 1]
                                        vision, mirror      0   1   0   1
                                        audio, replica      0   1   2   3

A plan covers all tensor-parallel ranks, because a plan per rank could not schedule collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from torchmm.common.module_names import LLM
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.orders import action_in_step
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.layouts import (
    ModuleLayers,
    StageSplit,
    balanced_split,
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
    encoder_mirrors: Mapping[str, int] | None = None,
) -> StageLayout:
    """Return a layout with the backbone of `megatron_layout` and separate encoder pipelines.

    Args:
        modules: Encoders, LLM, and generators.
        ranks: Number of pipeline ranks of the LLM.
        virtual_stages: Number of LLM stages per rank.
        pipelines: Number of ranks of each pipeline of an encoder, a divisor of `ranks`. Defaults to
            1, so that every rank has the full encoder.
        slices: Number of stages per rank of an encoder pipeline. Defaults to 1.
        mirrors: Number of ranks of the plan per tensor-parallel group of the LLM.
        encoder_mirrors: The same for each encoder, a divisor of `mirrors`. Defaults to 1.

    Raises:
        ValueError: The sizes do not divide each other, or an encoder has fewer layers than stages.
            See also `megatron_layout` and `build_layout`.
    """
    encoders = [module for module in modules if module.kind == "encoder"]
    passed = {**dict(pipelines or {}), **dict(slices or {}), **dict(encoder_mirrors or {})}
    if unknown := sorted(set(passed) - {encoder.name for encoder in encoders}):
        raise ValueError(f"degrees of {unknown}, which are not encoders")
    splits: dict[str, list[StageSplit]] = {}
    count = 0
    for encoder in encoders:
        size = (pipelines or {}).get(encoder.name, 1)
        pieces = (slices or {}).get(encoder.name, 1)
        if size < 1 or ranks % size:
            raise ValueError(
                f"{encoder.name}: pipelines of {size} ranks on the {ranks} ranks of the LLM; "
                f"use a divisor of {ranks}"
            )
        if not 1 <= pieces * size <= len(encoder.costs):
            raise ValueError(
                f"{encoder.name}: {len(encoder.costs)} layers for {size} ranks x {pieces} "
                "slices; use fewer ranks or slices"
            )
        module_mirrors = (encoder_mirrors or {}).get(encoder.name, 1)
        if module_mirrors < 1 or mirrors % module_mirrors:
            raise ValueError(
                f"{encoder.name}: {module_mirrors} mirrors, but the LLM has {mirrors}; use a "
                "divisor"
            )
        for index, layers in enumerate(balanced_split(encoder.costs_with_ends, size * pieces)):
            blocks = range(index // pieces, ranks, size)
            groups = range(0, mirrors, module_mirrors)
            ranks_of_replicas = tuple(rank * mirrors + first for rank in blocks for first in groups)
            split = StageSplit(
                layers, ranks_of_replicas, segment=index % pieces, virtual_stage=count + index
            )
            splits.setdefault(encoder.name, []).append(split)
        count += size * pieces
    backbone = modules[len(encoders) :]
    for stage in megatron_layout(backbone, ranks, virtual_stages).stages:
        ranks_of_replicas = tuple(rank * mirrors for rank in stage.ranks)
        split = StageSplit(
            stage.stop - stage.start, ranks_of_replicas, stage.segment, count + stage.virtual_stage
        )
        splits.setdefault(stage.module, []).append(split)
    counts = {module.name: mirrors for module in backbone}
    return _add_mirrors(build_layout(modules, splits), counts | dict(encoder_mirrors or {}))


def _add_mirrors(layout: StageLayout, counts: Mapping[str, int]) -> StageLayout:
    """Add the mirrors of stages to a layout.

    The stages of each mirror of an encoder are consecutive, followed by those of the backbone.

    Args:
        layout: Layout without mirrors.
        counts: Number of mirrors of each module. Defaults to 1.
    """
    if max(counts.values()) == 1:
        return layout
    encoders = set(encoder_names(layout))
    stages: list[StageSpec] = []
    index: dict[tuple[int, int], int] = {}
    turns = 0
    by_module = groupby(layout.stages, key=lambda s: s.module if s.module in encoders else LLM)
    for name, block in by_module:
        module_stages = list(block)
        first = module_stages[0].virtual_stage
        size = 1 + module_stages[-1].virtual_stage - first
        for mirror in range(counts.get(name, 1)):
            offset = len(stages) - module_stages[0].index
            index |= {(stage.index, mirror): stage.index + offset for stage in module_stages}
            stages += (
                replace(
                    stage,
                    index=stage.index + offset,
                    ranks=tuple(rank + mirror for rank in stage.ranks),
                    virtual_stage=turns + stage.virtual_stage - first,
                    tied_to=stage.tied_to + offset if stage.tied_to >= 0 else -1,
                    mirror=mirror,
                )
                for stage in module_stages
            )
            turns += size
    edges = []
    for source, destination in layout.edges:
        source_mirrors, destination_mirrors = (
            counts.get(layout.stages[s].module, 1) for s in (source, destination)
        )
        edges += [
            (index[source, m % source_mirrors], index[destination, m])
            for m in range(destination_mirrors)
        ]
    return StageLayout(tuple(stages), tuple(sorted(edges)), layout.sub_microbatched)


def encoder_names(layout: StageLayout) -> list[str]:
    """Return the names of the modules before the LLM.

    Raises:
        ValueError: There is no LLM.
    """
    names = list(dict.fromkeys(stage.module for stage in layout.stages))
    if LLM not in names:
        raise ValueError(f"modules {names}: no module is named {LLM!r}")
    return names[: names.index(LLM)]


def encoder_stages(graph: StageGraph) -> frozenset[int]:
    """Return the indices of the stages before the LLM."""
    encoders = set(encoder_names(graph.layout))
    return frozenset(stage.index for stage in graph.layout.stages if stage.module in encoders)


def backbone_order(
    graph: StageGraph,
    schedule: Callable[[StageGraph], ComputeOrder],
    sequence: Sequence[int] | None = None,
) -> ComputeOrder:
    """Return the backbone actions of a schedule without encoders, by pipeline rank.

    With mirrors, the result has the actions of the first mirror.

    Args:
        graph: Tasks of the step, including encoders.
        schedule: Schedule for the graph of the backbone.
        sequence: Microbatches in the execution order of the backbone. Defaults to ascending order.

    Raises:
        ValueError: `sequence` has not each microbatch once; what `schedule` raises.
    """
    microbatches = list(range(graph.microbatches) if sequence is None else sequence)
    if sorted(microbatches) != list(range(graph.microbatches)):
        raise ValueError(
            f"sequence {microbatches}: list each of the {graph.microbatches} microbatches once"
        )
    backbone, offset = _backbone(graph, microbatches)
    rows: list[tuple[Action, ...]] = []
    for row in schedule(backbone):
        actions = (
            a._replace(stage=a.stage + offset, microbatch=microbatches[a.microbatch]) for a in row
        )
        rows.append(tuple(new for a in actions if (new := action_in_step(graph, a)) is not None))
    return tuple(rows)


def _backbone(graph: StageGraph, microbatches: Sequence[int]) -> tuple[StageGraph, int]:
    """Return the graph without encoders, in the given microbatch order, and its first stage."""
    layout = graph.layout
    encoders = set(encoder_names(graph.layout))
    offset = next(stage.index for stage in layout.stages if stage.module not in encoders)
    kept_stages = [stage for stage in layout.stages[offset:] if not stage.mirror]
    first = min(stage.virtual_stage for stage in kept_stages)
    stages = tuple(
        replace(
            stage,
            index=stage.index - offset,
            ranks=tuple(rank // layout.mirror_count for rank in stage.ranks),
            virtual_stage=stage.virtual_stage - first if stage.virtual_stage >= 0 else -1,
            tied_to=-1,
            trainable=True,  # or backwards that only encoders need would be missing
        )
        for stage in kept_stages
    )
    indices = range(offset, offset + len(kept_stages))
    edges = tuple(
        (s - offset, d - offset) for s, d in layout.edges if s in indices and d in indices
    )
    sub_microbatched = layout.sub_microbatched - encoders
    counts = {
        name: tuple(graph.sub_microbatches[name][i] for i in microbatches)
        for name in sub_microbatched
    }
    return StageGraph(
        StageLayout(stages, edges, sub_microbatched), graph.microbatches, counts
    ), offset


def assign_round_robin(graph: StageGraph) -> StageGraph:
    """Assign the tasks of replicated modules to their replicas in round-robin order.

    Suitable for steps without backward passes, in which all replicas have the same load.
    """
    counts = {s.module: len(s.ranks) for s in graph.layout.stages if len(s.ranks) > 1}
    first = {stage.module: stage.index for stage in reversed(graph.layout.stages)}
    replica: dict[tuple[str, int, int], int] = {}
    for module, count in counts.items():
        tasks = [
            (microbatch, part)
            for microbatch in range(graph.microbatches)
            for part in range(graph.task_count(first[module], microbatch))
        ]
        replica |= {(module, *task): index % count for index, task in enumerate(tasks)}
    return replace(graph, replica=replica)
