"""Experts as Hugging Face's files have them, a matrix for each, made layer after layer.

In the model the experts of a layer are one tensor with gate and up projection side by side. Hugging
Face's `save_pretrained` takes all layers apart at once, into memory of its own, which for a model
of experts is most of its weights. Here its own conversion works on a layer at a time, and what it
makes goes to where the weights came from: to files, if they did; what it was made of is let go.
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

Keep = Callable[[list[Tensor]], list[Tensor]]
"""Copies of tensors, each by itself, in memory or in files."""
_LAYER = re.compile(r".*?\.layers\.\d+\.")
_STACKED = re.compile(r"\.experts\.\w+$")


def in_memory(values: list[Tensor]) -> list[Tensor]:
    """`Keep` for weights that are there."""
    return [value.clone() for value in values]


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Whether some of a model's tensors hold all experts of a layer."""
    return any(_STACKED.search(name) for name in names)


def taken_apart(hf: Any, tensors: dict[str, Tensor], keep: Keep) -> dict[str, Tensor]:
    """Tensors by their names in Hugging Face's files, in the order of these.

    Args:
        hf: Hugging Face's model; experts that were taken apart are left without values.
        tensors: its state, by the names that it is to be saved with. Emptied.
        keep: for what was made of several parts of a tensor.
    """
    left = remove_tied_weights_from_state_dict(tensors, hf)
    # Hugging Face sorts numbers in names by value.
    names = sorted(
        left,
        key=lambda name: [(0, int(p)) if p.isdigit() else (1, p) for p in name.split(".")],
    )
    found: dict[str, Tensor] = {}
    for _, layer in groupby(names, key=lambda n: m.group() if (m := _LAYER.match(n)) else ""):
        group = {name: left.pop(name) for name in layer}
        if not has_stacked_experts(group):
            found |= revert_weight_conversion(hf, group)
            continue
        # Tensors that were only renamed keep their storage and shape. All others are copied.
        given = {value.untyped_storage().data_ptr(): value.shape for value in group.values()}
        files = revert_weight_conversion(hf, group)
        made = [
            name
            for name, value in files.items()
            if given.get(value.untyped_storage().data_ptr()) != value.shape
        ]
        kept = dict(zip(made, keep([files[name] for name in made]), strict=True))
        found |= {name: kept.get(name, value) for name, value in files.items()}
        for name in group:
            if _STACKED.search(name):  # free the stacked experts
                owner, _, leaf = name.rpartition(".")
                module = hf.get_submodule(owner)
                empty = torch.empty_like(getattr(module, leaf), device="meta")
                setattr(module, leaf, nn.Parameter(empty, False))
    return found
