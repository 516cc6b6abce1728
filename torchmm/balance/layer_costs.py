"""What layers and tasks cost on given microbatches, as cutting modules and ordering tasks need it.

Costs are FLOPs, a unit that all modules share. They follow from what microbatches contain, so a
data set with many images gives the encoder a larger share of the ranks, and a microbatch with many
images longer encoder tasks. How fast a device does them is left out: it matters where modules
differ in efficiency, which only a measurement tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchmm.balance.flops import microbatch_flops
from torchmm.batch import LayerDescription, MicrobatchMeta, ModuleDescription
from torchmm.pipelining.actions import Action, ActionType
from torchmm.pipelining.graph import StageGraph
from torchmm.pipelining.layouts import ModuleLayers
from torchmm.pipelining.orders import inputs_need_gradient


def module_layers(
    modules: Sequence[ModuleDescription], microbatches: Sequence[MicrobatchMeta]
) -> list[ModuleLayers]:
    """Modules as `torchmm.pipelining.layouts` cuts them; costs are of forward and backward.

    Args:
        modules: encoders, LLM and generator, whole.
        microbatches: over which costs are averaged.

    Raises:
        ValueError: no microbatches.
    """
    if not microbatches:
        raise ValueError("no microbatches to average costs over")

    def mean(module: ModuleDescription, layers: tuple[LayerDescription, ...]) -> float:
        """FLOPs of a module as if it had only `layers`; the others decide what reaches it."""
        own = replace(module, layers=layers)
        shown = [own if m.name == module.name else m for m in modules]
        found = [microbatch_flops(shown, m, _text_tokens(m))[module.name] for m in microbatches]
        return sum(f.forward + f.backward for f in found) / len(found)

    result = []
    for module in modules:
        around = mean(module, ())
        draws = module.kind == "generator"  # and has its connector before its layers
        by_layer = {layer: mean(module, (layer,)) - around for layer in set(module.layers)}
        result.append(
            ModuleLayers(
                name=module.name,
                kind=module.kind,
                costs=tuple(by_layer[layer] for layer in module.layers),
                sub_microbatched=module.kind != "llm",
                trainable=(module.trainable,) * len(module.layers),
                pre_cost=mean(_stage(module, 0, 0), ()),
                post_cost=mean(_stage(module, len(module.layers), len(module.layers)), ()),
                pre_trainable=module.trainable or (draws and module.connector_trainable),
                post_trainable=module.trainable or (not draws and module.connector_trainable),
                tied=module.tied,
            )
        )
    return result


def task_durations(
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int] | None = None,
) -> Callable[[Action], float]:
    """FLOPs of the F, B, I and W of a step's tasks, for planners.

    Sub-microbatches of a microbatch count alike. A backward costs a forward for the inputs' and one
    for the weights' gradients, where they are needed.

    Args:
        modules: encoders, LLM and generator, whole.
        microbatches: of the graph.
        targets: positions that count in the loss, by microbatch; None: all text.
    """
    counts = targets or [_text_tokens(meta) for meta in microbatches]
    by_name = {module.name: module for module in modules}
    forward: dict[tuple[int, int], float] = {}
    passes: dict[tuple[int, int], dict[ActionType, int]] = {}
    for stage in graph.layout.stages:
        part = _stage(by_name[stage.module], stage.start, stage.stop)
        for index, (meta, count) in enumerate(zip(microbatches, counts, strict=True)):
            key = stage.index, index
            whole = microbatch_flops([part], meta, count)[stage.module].forward
            forward[key] = whole / max(1, graph.parts(*key))
            inputs = int(inputs_need_gradient(graph, *key))
            weights = int(stage.trainable)
            both = {ActionType.F: 1, ActionType.B: inputs + weights}
            passes[key] = both | {ActionType.I: inputs, ActionType.W: weights}

    def duration(action: Action) -> float:
        key = action.stage, action.microbatch
        return forward[key] * passes[key][action.type]

    return duration


def _stage(module: ModuleDescription, start: int, stop: int) -> ModuleDescription:
    first, last = start == 0, stop == len(module.layers)
    return replace(
        module,
        layers=module.layers[start:stop],
        pre_flops_per_unit=module.pre_flops_per_unit * first,
        context_flops_per_unit=module.context_flops_per_unit * first,
        flops_per_image=module.flops_per_image * first,
        post_flops_per_unit=module.post_flops_per_unit * last,
    )


def _text_tokens(meta: MicrobatchMeta) -> int:
    """Tokens that may be targets: no images, no padding."""
    return meta.used_tokens - sum(i.tokens for s in meta.samples for i in s.images)
