"""A modality module as the rest of the system sees it: something before, layers, something after.

FSDP, tensor parallelism, compilation, activation checkpointing, pipelining and cost models need
only this interface, so none of them knows a model family. Hugging Face's modules are kept whole
inside, with their own names, which makes checkpoints map one to one. A pipeline stage is the same
module with foreign layers replaced in place by `Skip`: indices, names and the forward of the
whole stay valid. Rejected: slicing the layer list, which breaks families whose forward indexes
per-layer settings by position.

A rank that runs several stages of a module keeps them in *one* module, so that names, weights and
checkpoints do not depend on the number of stages. What runs is a `stage_view` of it: a second
module around the same layers, with `Skip` for what belongs to the rank's other stages. Rejected:
one module per stage in the model, which gives every stage copies of rotary tables and parameters
names that depend on the cut.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchmm.common.layers import LayerDescription, LowRank, ModuleDescription, Rounded
from torchmm.models.between import Between, RowsOfRanks, WholeSequences
from torchmm.models.layers.connectors import linear_parts
from torchmm.models.layers.lora import CHILD, LoraSpec, adapted_linears, add_lora, of_adapter

LinearSizes = tuple[tuple[int, int], ...]
"""(inputs, outputs) of linear layers."""


class Skip(nn.Module):
    """Replaces a layer, an embedding or a head of another stage: returns its first input."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class StageRange(NamedTuple):
    """What one stage has of a module: layers [start, stop) and perhaps what is around them.

    The two flags do not follow from the numbers: if the embedding is a stage without layers, the
    stage after it starts at layer 0 too.
    """

    start: int
    stop: int
    has_pre: bool
    """Whether the stage has what comes before the layers."""
    has_post: bool
    """Whether the stage has what comes after the layers."""


def stage_ranges(layers: Sequence[tuple[int, int]]) -> list[StageRange]:
    """All stages of one module from their layers [start, stop), in order.

    Raises:
        ValueError: a stage does not begin where the previous one ends.
    """
    stops = [0, *(stop for _, stop in layers)]
    if [start for start, _ in layers] != stops[:-1] or stops != sorted(stops):
        raise ValueError(f"stages with layers {list(layers)} are not consecutive from 0")
    last = len(layers) - 1
    return [StageRange(*ends, i == 0, i == last) for i, ends in enumerate(layers)]


@dataclass(frozen=True)
class WeightFiles:
    """Where a module's pretrained weights are and what the files call them."""

    source: str | None = None
    """Local directory or Hugging Face id; None: random weights."""
    renames: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement): the first that matches the start of a name in the files
    turns it into the name within the module. A name without a match is not this module's."""
    old_names: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement): what files call parts of a name within the module."""
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(part of a name in the files, parts of names within the module): tensors that hold several of
    the module's one after another, all with the same number of rows."""
    optional: tuple[str, ...] = ()
    """Ends of names that files may lack, as what they stand for does nothing at first."""
    hf_prefixes: tuple[tuple[str, str], ...] = ()
    """(prefix within the module, prefix within the Hugging Face class the module is saved as)."""
    stacked_experts: bool = False
    """Whether the files hold a layer's experts as the module does, in a tensor for gate and up
    projection and one for the down projection, perhaps transposed, not two or three for each."""
    partial: bool = False
    """Whether the files may hold more than the module, such as a dual model's text tower."""

    def hf_name(self, name: str) -> str | None:
        """Return the name of a parameter in the Hugging Face class, or None if it has none."""
        for ours, theirs in self.hf_prefixes:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return None


class WeightInitializer(Protocol):
    """Knows the initial values of a model's parts, as every Hugging Face model does."""

    def _init_weights(self, module: nn.Module) -> None:
        """Fills the parameters and buffers that `module` has itself."""
        ...


class LayeredModule(nn.Module, ABC):
    """Base of all modality modules.

    Attributes:
        name: its name in the recipe ("llm", "vision", ...).
        layers_fqn: name of the list of transformer layers, relative to this module.
        forward_methods: methods besides `forward` that need gathered parameters.
        weights: where its pretrained weights come from.
        given_weights: the same of parts that come from elsewhere: those of `hf_prefixes`.
        linears_around: matrix products before the layers, which every input unit passes, and after
            them, which every output unit passes.
        connector_linears: encoders: how many of those after the layers are the connector's.
        unused: names of Hugging Face parameters that are not built because nothing reads them.
        is_first, is_last: whether it holds what comes before / after the layers.
        new_connector: whether pretrained weights may lack the connector, which is random then.
        splits: whether it was compared with the whole when split over tensor-parallel ranks.
        overlaps: whether tensor-parallel communication can go on below its products.
        recomputes: whether backward runs layers again instead of keeping all activations.
        taps: encoders: layers whose outputs the connector reads too; LLMs: layers behind which
            blocks of features are added (`torchmm.models.layers.deepstack`).
        loss_rows: LLMs: targets whose logits are computed at a time; 0: all.
        sharded_loss_rows: LLMs: the same if the vocabulary is sharded and `loss_rows` is 0.
        adapters: what is added to linears of the whole module, by their names.
        rounded: by layer of the whole module: which linears are to multiply in float8.
        between: access to hidden states between layers; behind a module's last they are whole.
        rows: how tensor-parallel ranks share the rows of messages; None: they send them whole.
        layer_modes: where that differs from task to task: by layer, what the next forward's
            backward runs again (as `torchmm.pipelining.plan.plan.LayerMode`); empty where it does
            not.
    """

    kind: Literal["llm", "encoder", "generator"]
    layers_fqn: str
    forward_methods: tuple[str, ...] = ()
    overlaps = True
    linears_around: tuple[LinearSizes, LinearSizes]
    connector_linears: int = 0

    def __init__(self, name: str, weights: WeightFiles) -> None:
        super().__init__()
        self.name = name
        self.weights = weights
        self.given_weights: tuple[WeightFiles, ...] = ()
        self.unused: set[str] = set()
        self.is_first = True
        self.is_last = True
        self.new_connector = False
        self.splits = True
        self.recomputes = False
        self.layer_modes: list[str] = []
        self.between: Between = WholeSequences()
        self.rows: RowsOfRanks | None = None
        self._keeps_slices: bool | None = None
        self.taps: tuple[int, ...] = ()
        self.loss_rows = 0
        self.sharded_loss_rows = 0
        self.adapters: dict[str, LoraSpec] = {}
        self.rounded: dict[int, Rounded] = {}

    @property
    @abstractmethod
    def hf(self) -> WeightInitializer:
        """The Hugging Face model inside, whose `_init_weights` applies to the whole module."""

    @abstractmethod
    def bare(self) -> LayeredModule:
        """The same module, whole and fresh, without adapters, on the current default device."""

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

    def rebuild(self) -> LayeredModule:
        """The same module, whole and fresh, on the current default device."""
        whole = self.bare()
        whole.add_adapters(self.adapters)
        return whole

    def add_adapters(self, adapters: Mapping[str, LoraSpec]) -> None:
        """Adds low-rank matrices to linears of the whole module, by their names."""
        for name, spec in adapters.items():
            linear = self.get_submodule(name)
            assert isinstance(linear, nn.Linear), name
            add_lora(linear, spec)
        self.adapters |= adapters

    def adaptable(self, *, connector: bool = False) -> list[str]:
        """Names of the linears that an adapter can be in: those of the layers, or of the connector,
        without experts, whose matrices are stacked, and without linears of a special class."""
        parts = [(f"{self.layers_fqn}.{index}", layer) for index, layer in self.indexed_layers()]
        if connector:
            parts = [("connector", self.get_submodule("connector"))]
        return [
            f"{fqn}.{name}"
            for fqn, part in parts
            for name, linear in part.named_modules()
            if type(linear) is nn.Linear
        ]

    @property
    def layers(self) -> list[nn.Module]:
        """This stage's transformer layers, in order."""
        return [layer for _, layer in self.indexed_layers()]

    def indexed_layers(self) -> list[tuple[int, nn.Module]]:
        """This stage's layers with their positions in the whole module."""
        every = self._layer_list()
        return [(i, layer) for i, layer in enumerate(every) if not isinstance(layer, Skip)]

    def add_after(self, index: int, hidden: Tensor, positions_K: Tensor, rows_KD: Tensor) -> Tensor:
        """What a layer of this stage has returned, with rows added (`Between.add_rows`)."""
        last, _ = self.indexed_layers()[-1]
        access = WholeSequences() if index == last and self.is_last else self.between
        return access.add_rows(hidden, positions_K, rows_KD)

    def _layer_list(self) -> nn.ModuleList:
        found = self.get_submodule(self.layers_fqn)
        assert isinstance(found, nn.ModuleList)
        return found

    def keep_stages(self, stages: Sequence[StageRange]) -> None:
        """Reduce the whole module (on the meta device) to the given stages of it; none: to nothing.

        Parameter names do not change.

        Raises:
            ValueError: a range is not one of this module's, or two stages share a layer.
        """
        self._keeps_slices = self.keeps_slices  # a stage may lack what tells
        every = self._layer_list()
        kept: set[int] = set()
        for stage in stages:
            own = range(stage.start, stage.stop)
            if not 0 <= stage.start <= stage.stop <= len(every) or kept & set(own):
                raise ValueError(
                    f"{self.name}: layers [{stage.start}, {stage.stop}) are out of range (it "
                    f"has {len(every)}), or belong to another stage"
                )
            kept |= set(own)
        for index in range(len(every)):
            if index not in kept:
                every[index] = Skip()
        self.is_first = any(stage.has_pre for stage in stages)
        self.is_last = any(stage.has_post for stage in stages)
        for fqn in () if self.is_first else self._pre_fqns():
            self.set_submodule(fqn, Skip())
        for fqn in () if self.is_last else self._post_fqns():
            self.set_submodule(fqn, Skip())

    def stage_view(self, stage: StageRange) -> LayeredModule:
        """One of the stages this module was reduced to, as a separate module.

        Its layers, embeddings and heads are the objects of this module: loading into one of the
        two, sharding or moving it changes the other.
        """
        with torch.device("meta"):
            view = self.rebuild()
        view.keep_stages([stage])
        for fqn, unit in units(view, view.layers_fqn):
            if not isinstance(unit, Skip):
                view.set_submodule(fqn, self.get_submodule(fqn))
        own = {id(p) for p in self.parameters()}
        foreign = [name for name, p in view.named_parameters() if id(p) not in own]
        assert not foreign, f"{self.name}: {foreign} are not parameters of the module"
        return view

    def describe(self) -> ModuleDescription:
        """Sizes of this stage, from which costs and memory follow."""
        before, after = self.linears_around
        trainable = {n: p.requires_grad for n, p in self.named_parameters()}
        of_connector = any(t for n, t in trainable.items() if n.startswith("connector."))
        own = {n: t for n, t in trainable.items() if not n.startswith("connector.")}
        styles: dict[nn.Module, str] = {}
        connector_adapters: tuple[LowRank | None, ...] = ()
        if self.adapters:
            plan = self.tensor_parallel_plan().items()
            styles = {part: style for name, style in plan for part in self.matching(name)}
        if hasattr(self, "connector") and any(n.startswith("connector.") for n in self.adapters):
            parts = linear_parts(self.get_submodule("connector"))
            connector_adapters = tuple(_sizes(part, styles) for part, _ in parts)
        return ModuleDescription(
            name=self.name,
            kind=self.kind,
            layers=tuple(
                replace(
                    self._describe_layer(index),
                    parameters=_parameters(layer),
                    adapters=_adapters(layer, styles),
                    rounded=self.rounded.get(index),
                )
                for index, layer in self.indexed_layers()
            ),
            pre_flops_per_unit=_flops(before) if self.is_first else 0,
            post_flops_per_unit=_flops(after) if self.is_last else 0,
            parameters=sum(p.numel() for p in self.parameters()),
            trainable=any(t for n, t in own.items() if not of_adapter(n)),
            connector_trainable=of_connector,
            connector_adapters=connector_adapters,
            connector_norm=self.connector_norm,
            connector_linears=self.connector_linears,
            patches_per_token=self.patches_per_token,
            taps=self.taps,
            loss_rows=self.loss_rows,
            sharded_loss_rows=self.sharded_loss_rows,
            tied=bool(self.tied_parameters()),
            pre_linears=before if self.is_first else (),
            post_linears=after if self.is_last else (),
            pre_parameters=sum(_parameters(self.get_submodule(f)) for f in self._pre_fqns()),
            post_parameters=sum(_parameters(self.get_submodule(f)) for f in self._post_fqns()),
            value_bytes=self.value_bytes,
            extra_tokens=self.extra_tokens,
            dummy_patches=self.dummy_patches,
            keeps_slices=self.keeps_slices,
        )

    def layer_sizes(self) -> list[LayerDescription]:
        """Sizes of all layers, those of other stages included."""
        return [self._describe_layer(i) for i in range(len(self._layer_list()))]

    @property
    def connector_norm(self) -> bool:
        """Whether the connector begins with a norm that has weights."""
        return False

    @property
    def patches_per_token(self) -> int:
        """Input units that become one output unit."""
        return 1

    @property
    def value_bytes(self) -> int:
        """See `ModuleDescription.value_bytes`."""
        return 4

    @property
    def extra_tokens(self) -> int:
        """Positions in the layers per image, in addition to its patches."""
        return 0

    @property
    def dummy_patches(self) -> int:
        """Patches of the dummy image for microbatches without images."""
        return 0

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Style of each linear, embedding and norm, by name pattern ("*" is one name part).

        Styles are Hugging Face's (colwise, rowwise, colwise_gather_output,
        replicated_with_grad_allreduce) and "embedding" (rows of the table), "packed_qkv" (an
        attention with queries, keys and values in one linear), "packed_gate_up" (the same for a
        feed-forward network), "experts" (experts, divided among the ranks), "sharded_norm" (a norm
        over the features of all ranks), "local_heads" (an attention that reads its number of
        heads), "head_scores" (an attention with sinks), "latent_heads" (latent attention),
        "delta_net" (a gated delta net, divided by heads), "short_convolution" (divided by
        channels), "sequence" (a norm or scale that works on slices under sequence parallelism).
        """
        styles = self._tensor_parallel_styles()
        return {pattern: style for pattern, style in styles.items() if self.matching(pattern)}

    @property
    def keeps_slices(self) -> bool:
        """Whether between layers of the whole module ranks have slices of the sequence, under
        sequence parallelism."""
        if self._keeps_slices is None:
            return "sequence" in self.tensor_parallel_plan().values()
        return self._keeps_slices

    def tensor_parallel_scopes(self) -> list[str]:
        """Patterns of the submodules whose input is gathered once for all linears inside: an
        attention, an MLP, experts, or a column-wise linear that is in a layer (or behind a norm) by
        itself.
        """
        alone = (f"{self.layers_fqn}.*", *self._norm_first())
        patterns: dict[str, None] = {}
        for pattern, style in self._tensor_parallel_styles().items():
            # A linear may be alone in a wrapper, which what contains it calls by its name.
            parent = pattern.removesuffix(".linear").rpartition(".")[0]
            if style == "experts" or (parent in alone and style == "colwise"):
                patterns[pattern] = None
            elif parent not in alone and style in ("colwise", "rowwise"):
                patterns[parent] = None
        return [pattern for pattern in patterns if self.matching(pattern)]

    def _norm_first(self) -> tuple[str, ...]:
        """Patterns of submodules with a norm before a column-wise linear."""
        return ()

    def matching(self, pattern: str) -> list[nn.Module]:
        """This stage's submodules with a name that fits ("*" is one name part)."""
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        return [
            module
            for name, module in self.named_modules()
            if expression.fullmatch(name) and not isinstance(module, Skip)
        ]

    def tied_parameters(self) -> dict[str, str]:
        """Parameters that are the same as another: {name: name of the other}."""
        return {}

    def tied_copies(self) -> dict[str, str]:
        """Parameters whose original is in a stage elsewhere: {name: its name there}.

        A copy gets the same gradient as the original, so both stay equal.
        """
        return {}

    def tie_parameters(self) -> None:
        """Restore ties, which moving off the meta device undoes."""
        for target, source in self.tied_parameters().items():
            owner, _, leaf = target.rpartition(".")
            setattr(self.get_submodule(owner), leaf, self.get_parameter(source))


def _flops(linears: LinearSizes) -> int:
    """Of a forward of one unit."""
    return sum(2 * inputs * outputs for inputs, outputs in linears)


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _adapters(layer: nn.Module, styles: Mapping[nn.Module, str]) -> tuple[LowRank, ...]:
    """Sizes of the low-rank matrices in a layer.

    Args:
        styles: of linears, as `LayeredModule.tensor_parallel_plan` has them.
    """
    every = (_sizes(linear, styles) for _, linear, _ in adapted_linears(layer))
    return tuple(sizes for sizes in every if sizes is not None)


def _sizes(linear: nn.Module, styles: Mapping[nn.Module, str]) -> LowRank | None:
    """Of a linear's adapter, if it has one."""
    lora = getattr(linear, CHILD, None)
    if lora is None or not isinstance(linear, nn.Linear):
        return None
    divided: dict[str, Literal["inputs", "outputs"]] = {"colwise": "outputs", "rowwise": "inputs"}
    return LowRank(
        linear.in_features,
        linear.out_features,
        lora.spec.rank,
        divided.get(styles.get(linear, "")),
        lora.magnitude is not None,
    )


def units(module: nn.Module, layers_fqn: str, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every layer, and every largest submodule that contains none, with their names."""
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        if layers_fqn == fqn or layers_fqn.startswith(f"{fqn}."):
            if layers_fqn == fqn:
                yield from ((f"{fqn}.{i}", layer) for i, layer in child.named_children())
            else:
                yield from units(child, layers_fqn, f"{fqn}.")
        else:
            yield fqn, child
