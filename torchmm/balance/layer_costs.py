"""What each layer of each module costs on given microbatches, as the cutting of modules needs it.

Costs are FLOPs, forward and backward together, of an average microbatch: a unit that all modules
share. They follow from what microbatches contain, so a data set with many images gives the encoder
a larger share of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchmm.balance.flops import microbatch_flops
from torchmm.batch import LayerDescription, MicrobatchMeta, ModuleDescription
from torchmm.pipelining.layouts import ModuleLayers


def module_layers(
    modules: Sequence[ModuleDescription], microbatches: Sequence[MicrobatchMeta]
) -> list[ModuleLayers]:
    """Modules as `torchmm.pipelining.layouts` cuts them.

    Args:
        modules: encoders and LLM, whole.
        microbatches: over which costs are averaged.

    Raises:
        ValueError: no microbatches.
    """
    if not microbatches:
        raise ValueError("no microbatches to average costs over")
    found = []
    for module in modules:
        by_layer = {
            layer: _mean_flops(module, (layer,), modules, microbatches)
            - _mean_flops(module, (), modules, microbatches)
            for layer in set(module.layers)
        }
        before = replace(module, post_flops_per_unit=0)
        behind = replace(module, pre_flops_per_unit=0)
        found.append(
            ModuleLayers(
                name=module.name,
                kind=module.kind,
                costs=tuple(by_layer[layer] for layer in module.layers),
                sub_microbatched=module.kind == "encoder",
                trainable=(module.trainable,) * len(module.layers),
                pre_cost=_mean_flops(before, (), modules, microbatches),
                post_cost=_mean_flops(behind, (), modules, microbatches),
                pre_trainable=module.trainable,
                post_trainable=module.trainable or module.connector_trainable,
                tied=module.tied,
            )
        )
    return found


def _mean_flops(
    module: ModuleDescription,
    layers: tuple[LayerDescription, ...],
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
) -> float:
    """Of one module as if it had only `layers`; the others decide which gradients reach it."""
    shown = [replace(module, layers=layers) if m.name == module.name else m for m in modules]
    found = [microbatch_flops(shown, meta)[module.name] for meta in microbatches]
    return sum(f.forward + f.backward for f in found) / len(found)
