"""Split stacked experts into one matrix per expert, as in the files of Hugging Face, by layer.

In the model the experts of a layer are one tensor, with gate and up projection side by side.
`save_pretrained` splits all layers at once, in memory, which takes most of the weights again. Here
the conversion of Hugging Face runs for one layer at a time, and the stacked tensors are released.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

_LAYER = re.compile(r".*?\.layers\.\d+\.")
_STACKED = re.compile(r"\.experts\.\w+$")


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Return True if a tensor has all experts of a layer."""
    return any(_STACKED.search(name) for name in names)


def split_stacked_experts(
    hf: Any, tensors: dict[str, Tensor], clone_tensors: Callable[[list[Tensor]], list[Tensor]]
) -> dict[str, Tensor]:
    """Return tensors by their names in Hugging Face files, in the order of the files.

    Args:
        hf: Model of Hugging Face. Its stacked experts move to the meta device.
        tensors: State of the model by names in the files. Emptied.
        clone_tensors: Function that returns a copy of each tensor, for tensors that the conversion
            computes.
    """
    remaining = remove_tied_weights_from_state_dict(tensors, hf)

    def natural(name: str) -> list[tuple[int, Any]]:
        # Hugging Face sorts numbers by value.
        return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]

    def layer_of(name: str) -> str:
        match = _LAYER.match(name)
        return match.group() if match else ""

    result: dict[str, Tensor] = {}
    for _, layer in groupby(sorted(remaining, key=natural), key=layer_of):
        group = {name: remaining.pop(name) for name in layer}
        if not has_stacked_experts(group):
            result |= revert_weight_conversion(hf, group)
            continue
        # Tensors that are only renamed share memory with the model and need no copy.
        shapes = {value.untyped_storage().data_ptr(): value.shape for value in group.values()}
        files = revert_weight_conversion(hf, group)
        computed = [
            n for n, v in files.items() if shapes.get(v.untyped_storage().data_ptr()) != v.shape
        ]
        copies = dict(zip(computed, clone_tensors([files[name] for name in computed]), strict=True))
        result |= {name: copies.get(name, value) for name, value in files.items()}
        for name in filter(_STACKED.search, group):
            module = hf.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            empty = torch.empty_like(getattr(module, leaf), device="meta")
            setattr(module, leaf, nn.Parameter(empty, False))
    return result
