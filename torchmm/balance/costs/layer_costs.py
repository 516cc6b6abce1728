"""What layers and tasks cost on given microbatches, as cutting modules and ordering tasks need it.

Costs are FLOPs, a unit that all modules share. They follow from what microbatches contain, so a
data set with many images gives the encoder a larger share of the ranks, and a microbatch with many
images longer encoder tasks. How fast a device does them is left out: it matters where modules
differ in efficiency, which only a measurement tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchmm.balance.costs.flops import gradients_arrive, module_sizes, part_flops, pass_flops
from torchmm.balance.costs.parts import Part, gradients, stage_parts
from torchmm.balance.costs.sizes import text_tokens
from torchmm.balance.costs.step_tasks import module_tasks
from torchmm.common.batch import MicrobatchMeta, ModuleDescription
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.layouts import ModuleLayers


def module_layers(
    modules: Sequence[ModuleDescription], microbatches: Sequence[MicrobatchMeta]
) -> list[ModuleLayers]:
    """Modules as `torchmm.pipelining.schedules.layouts` cuts them; costs are of forward and
    backward.

    Args:
        modules: encoders, LLM and generator, whole.
        microbatches: over which costs are averaged.

    Raises:
        ValueError: no microbatches.
    """
    if not microbatches:
        raise ValueError("no microbatches to average costs over")
    result = []
    for module in modules:
        parts = stage_parts(module, 0, len(module.layers))
        costs = _mean_costs(modules, module, parts, microbatches)
        of_layers = [i for i, part in enumerate(parts) if part.role == "layer"]
        layers = [costs[i] / parts[i].count for i in of_layers for _ in range(parts[i].count)]
        first = of_layers[0] if of_layers else len(parts)
        draws = module.kind == "generator"  # and has its connector before its layers
        result.append(
            ModuleLayers(
                name=module.name,
                kind=module.kind,
                costs=tuple(layers),
                sub_microbatched=module.kind != "llm",
                trainable=(module.trainable,) * len(module.layers),
                pre_cost=sum(costs[:first]),
                post_cost=sum(costs[first + len(of_layers) :]),
                pre_trainable=module.trainable or (draws and module.connector_trainable),
                post_trainable=module.trainable or (not draws and module.connector_trainable),
                tied=module.tied,
            )
        )
    return result


def _mean_costs(
    modules: Sequence[ModuleDescription],
    module: ModuleDescription,
    parts: Sequence[Part],
    microbatches: Sequence[MicrobatchMeta],
) -> list[float]:
    """FLOPs of forward and backward of every part of a whole module, mean over microbatches."""
    costs = [0.0] * len(parts)
    for meta in microbatches:
        sizes = module_sizes(module, meta, text_tokens(meta))
        if sizes is None:
            continue
        arrives = gradients_arrive(modules, meta)[module.name]
        for index, (part, inputs, weights) in enumerate(gradients(parts, arrives)):
            dense, attention = (float(flops_N[0]) for flops_N in part_flops(module, part, sizes))
            backward = bool(inputs) * (dense + 2 * attention) + weights * dense
            costs[index] += (dense + attention + backward) / len(microbatches)
    return costs


def task_durations(
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int] | None = None,
) -> Callable[[Action], float]:
    """FLOPs of the F, B, I and W of a step's tasks, for planners; mirrors share a stage's.

    Args:
        modules: encoders, LLM and generator, whole.
        microbatches: of the graph.
        targets: positions that count in the loss, by microbatch; None: all text.

    Raises:
        ValueError: the graph has another number of microbatches, or more sub-microbatches than
            there are images.
    """
    counts = targets or [text_tokens(meta) for meta in microbatches]
    by_name = {m.name: module_tasks(graph, m, microbatches, counts) for m in modules}
    flops: dict[tuple[ActionType, int, int, int], float] = {}
    for stage in graph.layout.stages:
        tasks = by_name[stage.module]
        parts = stage_parts(tasks.module, stage.start, stage.stop)
        arrives_N = tasks.gradient_arrives_N(graph, stage.index)
        found = pass_flops(tasks.module, parts, tasks.useful, arrives_N)
        backward_N = found.inputs_N + found.weights_N
        values = (found.forward_N, backward_N, found.inputs_N, found.weights_N)
        for kind, values_N in zip(_KINDS, values, strict=True):
            for key, value in zip(tasks.keys, values_N.tolist(), strict=True):
                flops[kind, stage.index, *key] = value / len(graph.layout.mirrored[stage.index])

    return lambda action: flops[action[:4]]


_KINDS = (ActionType.F, ActionType.B, ActionType.I, ActionType.W)
