"""A modality module as the rest of the system sees it: something before, layers, something after.

FSDP, tensor parallelism, compilation, activation checkpointing, pipelining and cost models need
only this interface, so none of them knows a model family. Hugging Face's modules are kept whole
inside, with their own names, which makes checkpoints map one to one. A pipeline stage is the same
module with foreign layers replaced in place by `Skip`: indices, names and the forward of the
whole stay valid. Rejected: slicing the layer list, which breaks families whose forward indexes
per-layer settings by position.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from torchmm.batch import LayerDescription, ModuleDescription


class Skip(nn.Module):
    """Stands where another stage has a layer, an embedding or a head: returns its first input."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


@dataclass(frozen=True)
class WeightFiles:
    """Where a module's pretrained weights lie and what the files call them."""

    source: str | None = None
    """Local directory or Hugging Face id; None: random weights."""
    renames: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement): the first that matches the start of a name in the files
    turns it into the name within the module. A name without a match is not this module's."""
    hf_prefixes: tuple[tuple[str, str], ...] = ()
    """(prefix within the module, prefix within the Hugging Face class the module is saved as)."""
    partial: bool = False
    """Whether the files may hold more than the module, such as a dual model's text tower."""


class LayeredModule(nn.Module, ABC):
    """Base of all modality modules.

    Attributes:
        name: its name in the recipe ("llm", "vision", ...).
        layers_fqn: name of the list of transformer layers, relative to this module.
        forward_methods: further methods that need gathered parameters, beside `forward`.
        weights: where its pretrained weights come from.
        unused: names of Hugging Face parameters that are not built because nothing reads them.
        is_first, is_last: whether this stage holds what stands before / behind the layers.
    """

    kind: Literal["llm", "encoder"]
    layers_fqn: str
    forward_methods: tuple[str, ...] = ()

    def __init__(self, name: str, weights: WeightFiles) -> None:
        super().__init__()
        self.name = name
        self.weights = weights
        self.unused: set[str] = set()
        self.is_first = True
        self.is_last = True

    @property
    @abstractmethod
    def hf(self) -> PreTrainedModel:
        """The Hugging Face model inside, whose `_init_weights` applies to the whole module."""

    @abstractmethod
    def rebuild(self) -> LayeredModule:
        """The same module, whole and fresh, on the current default device."""

    @abstractmethod
    def _pre_fqns(self) -> tuple[str, ...]:
        """Submodules that only the first stage needs."""

    @abstractmethod
    def _post_fqns(self) -> tuple[str, ...]:
        """Submodules that only the last stage needs."""

    @abstractmethod
    def _tensor_parallel_styles(self) -> dict[str, str]: ...

    @abstractmethod
    def _describe_layer(self, index: int) -> LayerDescription: ...

    @abstractmethod
    def _flops_around(self) -> tuple[int, int]:
        """Forward FLOPs per input unit before the layers and per output unit behind them."""

    @property
    def layers(self) -> list[nn.Module]:
        """This stage's transformer layers, in order."""
        return [layer for _, layer in self.indexed_layers()]

    def indexed_layers(self) -> list[tuple[int, nn.Module]]:
        """This stage's layers with their positions in the whole module."""
        every = self._layer_list()
        return [(i, layer) for i, layer in enumerate(every) if not isinstance(layer, Skip)]

    def _layer_list(self) -> nn.ModuleList:
        found = self.get_submodule(self.layers_fqn)
        assert isinstance(found, nn.ModuleList)
        return found

    def keep_layers(self, start: int, stop: int) -> None:
        """Turn the whole module (on the meta device) into the stage with layers [start, stop).

        What stands before the layers stays if `start` is 0, what stands behind them if `stop` is
        the number of layers. Parameter names do not change.

        Raises:
            ValueError: the range is not one of this module's.
        """
        every = self._layer_list()
        if not 0 <= start <= stop <= len(every):
            raise ValueError(f"{self.name}: no layers [{start}, {stop}) among {len(every)}")
        for index in range(len(every)):
            if not start <= index < stop:
                every[index] = Skip()
        self.is_first, self.is_last = start == 0, stop == len(every)
        for fqn in () if self.is_first else self._pre_fqns():
            self.set_submodule(fqn, Skip())
        for fqn in () if self.is_last else self._post_fqns():
            self.set_submodule(fqn, Skip())

    def describe(self) -> ModuleDescription:
        """Sizes of this stage, from which costs and memory follow."""
        before, behind = self._flops_around()
        trainable = {n: p.requires_grad for n, p in self.named_parameters()}
        return ModuleDescription(
            name=self.name,
            kind=self.kind,
            layers=tuple(self._describe_layer(i) for i, _ in self.indexed_layers()),
            pre_flops_per_unit=before if self.is_first else 0,
            post_flops_per_unit=behind if self.is_last else 0,
            parameters=sum(p.numel() for p in self.parameters()),
            trainable=any(t for n, t in trainable.items() if not n.startswith("connector.")),
            connector_trainable=any(t for n, t in trainable.items() if n.startswith("connector.")),
            merge=self.merge,
        )

    @property
    def merge(self) -> int:
        """Input units per row and column that become one output unit."""
        return 1

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Style of each linear, embedding and norm, by name pattern ("*" is one name part).

        Styles are Hugging Face's (colwise, rowwise, colwise_gather_output,
        replicated_with_grad_allreduce) and "embedding" (rows of the table), "packed_qkv" (an
        attention with queries, keys and values in one linear), "sequence" (a norm that works on
        sequence slices under sequence parallelism).
        """
        styles = self._tensor_parallel_styles()
        return {pattern: style for pattern, style in styles.items() if self._has(pattern)}

    def tensor_parallel_scopes(self) -> list[str]:
        """Patterns of the submodules whose input is gathered once for all linears inside."""
        patterns = dict.fromkeys(
            pattern.rpartition(".")[0]
            for pattern, style in self._tensor_parallel_styles().items()
            if style in ("colwise", "rowwise")
        )
        return [pattern for pattern in patterns if self._has(pattern)]

    def _has(self, pattern: str) -> bool:
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        return any(
            expression.fullmatch(name) and not isinstance(module, Skip)
            for name, module in self.named_modules()
        )

    def stored_as(self) -> dict[str, str]:
        """Names under which files keep parameters that they do not keep under their own."""
        return {}

    @property
    def new_connector(self) -> bool:
        """Whether pretrained weights may lack the connector, which then starts at random."""
        return False

    def tied_parameters(self) -> dict[str, str]:
        """Names of parameters that are another one: {name: name of the one it is}."""
        return {}

    def tie_parameters(self) -> None:
        """Restore ties, which moving off the meta device undoes."""
        for target, source in self.tied_parameters().items():
            owner, _, leaf = target.rpartition(".")
            setattr(self.get_submodule(owner), leaf, self.get_parameter(source))
