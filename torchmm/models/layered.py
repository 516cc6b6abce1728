"""The common interface of modality modules: a pre-part, transformer layers and a post-part.

    LLM       embedding -> layers -> final norm, head, loss
    encoder   patch embedding -> layers -> final norm, connector

FSDP, tensor parallelism, compilation, activation checkpointing, pipelining and the cost models use
only this interface. They are independent of the model family. A module wraps the complete Hugging
Face model with unchanged parameter names, so that checkpoints map one to one.

Pipeline stages. A stage is the same module, in which `SkippedLayer` replaces the layers of other
stages in place. Layer indices, parameter names and the Hugging Face forward stay valid. Slicing the
layer list instead would break families whose forward indexes per-layer settings by position.

Several stages on one rank. The rank stores all stages of a module in *one* module, so that names,
weights and checkpoints do not depend on the number of stages. Each stage runs as a `stage_view`: a
second module that shares the layers and has `SkippedLayer` for the other stages.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchmm.common.layers import (
    AdapterSizes,
    Float8Linears,
    LayerDescription,
    ModuleDescription,
    QuantizedLinear,
)
from torchmm.models.layers.connectors import iter_linears
from torchmm.models.layers.lora import (
    CHILD,
    LoraSpec,
    adapted_linears,
    add_lora,
    is_adapter_parameter,
)
from torchmm.models.sequence_layout import RowSharding, SequenceOps, UnshardedSequenceOps
from torchmm.models.weight_formats import WeightFormat

LinearSizes = tuple[tuple[int, int], ...]
"""Pairs (input features, output features) of linear layers."""


class SkippedLayer(nn.Module):
    """A placeholder for a layer, embedding or head of another stage. It returns its first input."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `hidden` unchanged. Other arguments are ignored."""
        return hidden


class StageRange(NamedTuple):
    """The range of a module that one stage runs: layers [start, stop) and the parts around them.

    The two flags do not follow from the range. If the embedding is a stage without layers, the next
    stage also starts at layer 0.
    """

    start: int
    stop: int
    has_pre: bool
    """Whether the stage has the part before the layers."""
    has_post: bool
    """Whether the stage has the part after the layers."""


def stage_ranges(layers: Sequence[tuple[int, int]]) -> list[StageRange]:
    """Return the stages of one module from their layer ranges [start, stop), in order.

    Raises:
        ValueError: A stage does not start at the end of the previous stage.
    """
    stops = [0, *(stop for _, stop in layers)]
    if [start for start, _ in layers] != stops[:-1] or stops != sorted(stops):
        raise ValueError(f"stages with layers {list(layers)} are not consecutive from 0")
    last = len(layers) - 1
    return [StageRange(*bounds, i == 0, i == last) for i, bounds in enumerate(layers)]


class NewRows(NamedTuple):
    """Rows of new tokens in the token embedding and the LM head."""

    names: tuple[str, ...]
    """Names of the two weights in the module."""
    stored: int
    """Number of rows in the files."""
    known: int
    """Number of rows whose mean is the initial value of a new row."""
    added: tuple[int, ...]
    """Indices of the new rows."""


@dataclass(frozen=True)
class WeightFiles:
    """The location of the pretrained weights of a module and the mapping of parameter names."""

    source: str | None = None
    """Local directory or Hugging Face id. None means random weights."""
    renames: tuple[tuple[str, str], ...] = ()
    """Pairs (regular expression, replacement). The first expression that matches the start of a
    name in the files maps it to the name in the module. Names without a match are ignored."""
    legacy_names: tuple[tuple[str, str], ...] = ()
    """Pairs (regular expression, replacement) that map parts of module names to old file names."""
    fused_tensors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Pairs (part of a name in the files, parts of names in the module). The file tensor is the
    concatenation of the module tensors, which all have the same number of rows."""
    optional_suffixes: tuple[str, ...] = ()
    """Suffixes of names that may be missing in the files: their initial values have no effect."""
    hf_prefixes: tuple[tuple[str, str], ...] = ()
    """Pairs (prefix in the module, prefix in the Hugging Face class of the export)."""
    stacked_experts: bool = False
    """Whether the files store the experts of a layer as stacked tensors, as the module does.

    One tensor has all gate and up projections, another all down projections. Both may be
    transposed. Otherwise, the files have two or three tensors for each expert.
    """
    allows_other_tensors: bool = False
    """Whether the files may contain other weights, such as the text encoder of a dual model."""
    new_rows: NewRows | None = None
    """Rows of the token embedding and the LM head that the files lack, if any."""

    def hf_name(self, name: str) -> str | None:
        """Return the name of a parameter in the Hugging Face class, or None if it has none."""
        for module_prefix, hf_prefix in self.hf_prefixes:
            if name.startswith(module_prefix):
                return hf_prefix + name.removeprefix(module_prefix)
        return None


class WeightInitializer(Protocol):
    """An object with the weight initialization of a Hugging Face model."""

    def _init_weights(self, module: nn.Module) -> None:
        """Fill the parameters and buffers of `module`, without those of its submodules."""
        ...


class LayeredModule(nn.Module, ABC):
    """The base class of all modality modules.

    Attributes:
        name: Name in the recipe ("llm", "vision", ...).
        layers_fqn: Name of the list of transformer layers, relative to this module.
        forward_methods: Methods besides `forward` that need all-gathered (FSDP) parameters.
        weights: Location and names of the pretrained weights.
        extra_weights: Location and names of weights from other sources, for the parts in
            `hf_prefixes`.
        linears_outside_layers: Linear layers before the transformer layers (applied to each input
            unit) and after them (applied to each output unit).
        connector_linears: Encoders: number of linear layers of the connector in
            `linears_outside_layers`.
        unused: Names of Hugging Face parameters that are not built, because no output uses them.
        is_first: Whether the module has the part before the layers.
        is_last: Whether the module has the part after the layers.
        is_connector_new: Whether pretrained weights may lack the connector, which is random then.
        splits: Whether tests compare tensor-parallel ranks with the unsharded module.
        overlaps: Whether tensor-parallel communication can overlap with the matmuls.
        recomputes: Whether the backward pass recomputes layers instead of saving all activations.
        taps: Encoders: layers whose outputs the connector also reads. LLMs: layers after which
            DeepStack features are added (`torchmm.models.layers.deepstack`).
        loss_chunk_targets: LLMs: number of targets per chunk of the loss. 0 means one chunk.
        sharded_loss_chunk_targets: LLMs: the same for a sharded vocabulary, if `loss_chunk_targets`
            is 0.
        adapters: Maps names of linear layers of the full module to their adapters.
        rounded: Maps layer indices of the full module to the linear layers that use float8.
        weight_formats: Maps names of linear layers of the full module to the storage form of their
            weight, if it is not a tensor of its values.
        between: Access to hidden states between layers. After the last layer of a module they are
            always unsharded.
        rows: Sharding of messages over tensor-parallel ranks. None means unsharded messages.
        recompute_modes: Recomputation mode of each layer for the next forward pass, if modes differ
            between tasks (as `torchmm.pipelining.plan.plan.RecomputeMode`). Empty otherwise.
    """

    kind: Literal["llm", "encoder", "generator"]
    layers_fqn: str
    forward_methods: tuple[str, ...] = ()
    supports_comm_overlap = True
    linears_outside_layers: tuple[LinearSizes, LinearSizes]
    connector_linears: int = 0

    def __init__(self, name: str, weights: WeightFiles) -> None:
        super().__init__()
        self.name = name
        self.weights = weights
        self.extra_weights: tuple[WeightFiles, ...] = ()
        self.unused: set[str] = set()
        self.is_first = True
        self.is_last = True
        self.is_connector_new = False
        self.supports_tensor_parallel = True
        self.uses_recomputation = False
        self.recompute_modes: list[str] = []
        self.sequence_ops: SequenceOps = UnshardedSequenceOps()
        self.rows: RowSharding | None = None
        self._keeps_slices: bool | None = None
        self.deepstack_layers: tuple[int, ...] = ()
        self.loss_chunk_targets = 0
        self.sharded_loss_chunk_targets = 0
        self.adapters: dict[str, LoraSpec] = {}
        self.rounded: dict[int, Float8Linears] = {}
        self.weight_formats: dict[str, WeightFormat] = {}

    @property
    @abstractmethod
    def hf(self) -> WeightInitializer:
        """The wrapped Hugging Face model, whose `_init_weights` applies to the full module."""

    @abstractmethod
    def build_without_adapters(self) -> LayeredModule:
        """Build the full module again, without adapters, on the current default device."""

    @abstractmethod
    def _pre_fqns(self) -> tuple[str, ...]:
        """Return the names of submodules that only the first stage needs."""

    @abstractmethod
    def _post_fqns(self) -> tuple[str, ...]:
        """Return the names of submodules that only the last stage needs."""

    @abstractmethod
    def _tensor_parallel_styles(self) -> dict[str, str]: ...

    @abstractmethod
    def _describe_layer(self, index: int) -> LayerDescription: ...

    def rebuild(self) -> LayeredModule:
        """Build the full module again, with adapters, on the current default device."""
        full_module = self.build_without_adapters()
        full_module.add_adapters(self.adapters)
        return full_module

    def add_adapters(self, adapters: Mapping[str, LoraSpec]) -> None:
        """Add low-rank matrices to linear layers of the full module.

        Args:
            adapters: Maps names of linear layers to adapters.
        """
        for name, spec in adapters.items():
            linear = self.get_submodule(name)
            assert isinstance(linear, nn.Linear), name
            add_lora(linear, spec)
        self.adapters |= adapters

    def adaptable_linears(self, *, connector: bool = False) -> list[str]:
        """Return the names of the linear layers that support an adapter.

        Experts (stacked matrices) and subclasses of `nn.Linear` are not supported.

        Args:
            connector: Whether to return those of the connector instead of the transformer layers.
        """
        parts = [(f"{self.layers_fqn}.{index}", layer) for index, layer in self.indexed_layers()]
        if connector:
            parts = [("connector", self.get_submodule("connector"))]
        return [
            f"{fqn}.{name}"
            for fqn, part in parts
            for name, linear in part.named_modules()
            if type(linear) is nn.Linear
        ]

    def find_weight_format(self, name: str, tensor: Tensor) -> WeightFormat | None:
        """Return the storage form of a parameter, or None if it is a tensor of its values.

        Args:
            name: Name of the parameter.
            tensor: The parameter. It has floating-point values until the module is converted.
        """
        return (
            None
            if tensor.is_floating_point()
            else self.weight_formats.get(name.removesuffix(".weight"))
        )

    @property
    def layers(self) -> list[nn.Module]:
        """The transformer layers of this stage, in order."""
        return [layer for _, layer in self.indexed_layers()]

    def indexed_layers(self) -> list[tuple[int, nn.Module]]:
        """Return the layers of this stage with their indices in the full module."""
        all_layers = self._layer_list()
        return [
            (i, layer) for i, layer in enumerate(all_layers) if not isinstance(layer, SkippedLayer)
        ]

    def add_after_layer(
        self, index: int, hidden: Tensor, positions_K: Tensor, rows_KD: Tensor
    ) -> Tensor:
        """Return the output of layer `index` with feature rows added (`SequenceOps.add_rows`).

        Args:
            index: Index of the layer in the full module.
            hidden: (..., T, D), or the slice of a rank.
            positions_K: (K,), int64, positions within T.
            rows_KD: (K, D), dtype of `hidden`.
        """
        last, _ = self.indexed_layers()[-1]
        access = UnshardedSequenceOps() if index == last and self.is_last else self.sequence_ops
        return access.add_rows(hidden, positions_K, rows_KD)

    def _layer_list(self) -> nn.ModuleList:
        layers = self.get_submodule(self.layers_fqn)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def reduce_to_stages(self, stages: Sequence[StageRange]) -> None:
        """Reduce the full module (on the meta device) in place to the given stages.

        Without stages, no parameters remain. Parameter names do not change.

        Raises:
            ValueError: A range does not fit this module, or two stages share a layer.
        """
        self._keeps_slices = self.is_sequence_sharded  # computed now: a stage may lack the norms
        all_layers = self._layer_list()
        retained: set[int] = set()
        for stage in stages:
            indices = set(range(stage.start, stage.stop))
            if not 0 <= stage.start <= stage.stop <= len(all_layers) or retained & indices:
                raise ValueError(
                    f"{self.name}: layers [{stage.start}, {stage.stop}) are out of range (it "
                    f"has {len(all_layers)}), or belong to another stage"
                )
            retained |= indices
        for index in range(len(all_layers)):
            if index not in retained:
                all_layers[index] = SkippedLayer()
        self.is_first = any(stage.has_pre for stage in stages)
        self.is_last = any(stage.has_post for stage in stages)
        for fqn in () if self.is_first else self._pre_fqns():
            self.set_submodule(fqn, SkippedLayer())
        for fqn in () if self.is_last else self._post_fqns():
            self.set_submodule(fqn, SkippedLayer())

    def stage_view(self, stage: StageRange) -> LayeredModule:
        """Return one of the stages of this module as a separate module.

        Both modules share the layers, embeddings and heads. Loading, sharding or moving one of them
        also changes the other.
        """
        with torch.device("meta"):
            view = self.rebuild()
        view.reduce_to_stages([stage])
        for fqn, unit in named_units(view, view.layers_fqn):
            if not isinstance(unit, SkippedLayer):
                view.set_submodule(fqn, self.get_submodule(fqn))
        parameters = {id(p) for p in self.parameters()}
        foreign = [name for name, p in view.named_parameters() if id(p) not in parameters]
        assert not foreign, f"{self.name}: {foreign} are not parameters of the module"
        return view

    def describe(self) -> ModuleDescription:
        """Return the shapes of this stage, from which costs and memory are computed."""
        before, after = self.linears_outside_layers
        trainable = {n: p.requires_grad for n, p in self.named_parameters()}
        of_connector = any(t for n, t in trainable.items() if n.startswith("connector."))
        without_connector = {n: t for n, t in trainable.items() if not n.startswith("connector.")}
        styles: dict[nn.Module, str] = {}
        connector_adapters: tuple[AdapterSizes | None, ...] = ()
        if self.adapters or self.weight_formats:
            plan = self.tensor_parallel_plan().items()
            styles = {
                part: style for name, style in plan for part in self.matching_submodules(name)
            }
        if hasattr(self, "connector") and any(n.startswith("connector.") for n in self.adapters):
            parts = iter_linears(self.get_submodule("connector"))
            connector_adapters = tuple(_describe_adapter(part, styles) for part, _ in parts)
        return ModuleDescription(
            name=self.name,
            kind=self.kind,
            layers=tuple(
                replace(
                    self._describe_layer(index),
                    parameters=_count_parameters(layer),
                    adapters=_describe_adapters(layer, styles),
                    rounded=self.rounded.get(index),
                    quantized=self._describe_quantized(index, styles),
                )
                for index, layer in self.indexed_layers()
            ),
            embedding_flops_per_unit=_forward_flops(before) if self.is_first else 0,
            head_flops_per_unit=_forward_flops(after) if self.is_last else 0,
            parameters=sum(p.numel() for p in self.parameters()),
            trainable=any(
                t
                for n, t in without_connector.items()
                if not is_adapter_parameter(n) and n not in self.token_weights
            ),
            token_rows_trainable=any(trainable.get(n, False) for n in self.token_weights),
            connector_trainable=of_connector,
            connector_adapters=connector_adapters,
            connector_norm=self.connector_norm,
            connector_linears=self.connector_linears,
            patches_per_token=self.patches_per_token,
            deepstack_layers=self.deepstack_layers,
            loss_chunk_targets=self.loss_chunk_targets,
            sharded_loss_chunk_targets=self.sharded_loss_chunk_targets,
            tied=bool(self.tied_parameters()),
            embedding_linears=before if self.is_first else (),
            head_linears=after if self.is_last else (),
            embedding_parameters=sum(
                _count_parameters(self.get_submodule(f)) for f in self._pre_fqns()
            ),
            head_parameters=sum(
                _count_parameters(self.get_submodule(f)) for f in self._post_fqns()
            ),
            input_value_bytes=self.input_value_bytes,
            extra_tokens=self.extra_tokens,
            dummy_patches=self.dummy_patches,
            is_sequence_sharded=self.is_sequence_sharded,
        )

    @property
    def token_weights(self) -> tuple[str, ...]:
        """Names of weights of which only rows of new tokens are trained."""
        return ()

    def _describe_quantized(
        self, index: int, styles: Mapping[nn.Module, str]
    ) -> tuple[QuantizedLinear, ...]:
        """Return the linear layers of a layer whose weights have a storage form.

        Args:
            index: Index of the layer.
            styles: Maps linear layers to styles of `tensor_parallel_plan`.
        """
        sizes = []
        for name, form in self.weight_formats.items():
            if name.startswith(f"{self.layers_fqn}.{index}."):
                linear = self.get_submodule(name)
                assert isinstance(linear, nn.Linear), name
                is_sharded = styles.get(linear) in ("colwise", "rowwise")
                value_bytes = form.block_bytes / form.block
                sizes.append(
                    QuantizedLinear(
                        linear.in_features, linear.out_features, is_sharded, value_bytes
                    )
                )
        return tuple(sizes)

    def layer_sizes(self) -> list[LayerDescription]:
        """Return the shapes of all layers, including those of other stages."""
        return [self._describe_layer(i) for i in range(len(self._layer_list()))]

    @property
    def connector_norm(self) -> bool:
        """True if the first weighted submodule of the connector is a norm."""
        return False

    @property
    def patches_per_token(self) -> int:
        """Number of input units per output unit."""
        return 1

    @property
    def input_value_bytes(self) -> int:
        """Bytes per input value (`ModuleDescription.input_value_bytes`)."""
        return 4

    @property
    def extra_tokens(self) -> int:
        """Number of positions per image in the layers, in addition to the patches."""
        return 0

    @property
    def dummy_patches(self) -> int:
        """Number of patches of the dummy image for microbatches without images."""
        return 0

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return the style of each linear layer, embedding and norm, by name pattern.

        In a pattern, "*" matches one name part. Styles of Hugging Face are colwise, rowwise,
        colwise_gather_output and replicated_with_grad_allreduce. The other styles are:

        - "embedding": rows of the embedding table are sharded.
        - "packed_qkv": an attention with queries, keys and values in one linear layer.
        - "packed_gate_up": an MLP with gate and up projections in one linear layer.
        - "experts": experts are divided among the ranks.
        - "sharded_norm": a norm over the features of all ranks.
        - "local_heads": an attention that reads its number of heads.
        - "head_scores": an attention with sinks.
        - "latent_heads": multi-head latent attention.
        - "delta_net": a gated delta net, sharded by heads.
        - "short_convolution": a short convolution, sharded by channels.
        - "sequence": a norm or scale on sequence slices, under sequence parallelism.
        """
        styles = self._tensor_parallel_styles()
        return {pattern: styles[pattern] for pattern in self._find_used_patterns(styles)}

    @property
    def is_sequence_sharded(self) -> bool:
        """True if hidden states between layers are slices under sequence parallelism."""
        if self._keeps_slices is None:
            return "sequence" in self.tensor_parallel_plan().values()
        return self._keeps_slices

    def tensor_parallel_scopes(self) -> list[str]:
        """Return patterns of the submodules whose input is all-gathered once for all linear layers.

        Such a submodule is an attention, an MLP, experts, or a single column-wise linear layer that
        is a direct child of a layer or follows a norm.
        """
        direct_parents = (f"{self.layers_fqn}.*", *self._norm_patterns())
        patterns: dict[str, None] = {}
        for pattern, style in self._tensor_parallel_styles().items():
            # A wrapper may contain a single linear layer. Its parent calls the wrapper by name.
            parent = pattern.removesuffix(".linear").rpartition(".")[0]
            if style == "experts" or (parent in direct_parents and style == "colwise"):
                patterns[pattern] = None
            elif parent not in direct_parents and style in ("colwise", "rowwise"):
                patterns[parent] = None
        return self._find_used_patterns(patterns)

    def _norm_patterns(self) -> tuple[str, ...]:
        """Return patterns of submodules with a norm before a column-wise linear layer."""
        return ()

    def matching_submodules(self, pattern: str) -> list[nn.Module]:
        """Return the submodules of this stage whose name matches ("*" matches one name part)."""
        expression = _name_expression(pattern)
        return [module for name, module in self._present_modules() if expression.fullmatch(name)]

    def _find_used_patterns(self, patterns: Iterable[str]) -> list[str]:
        """Return the patterns that match a submodule of this stage."""
        names = [name for name, _ in self._present_modules()]
        return [p for p in patterns if any(map(_name_expression(p).fullmatch, names))]

    def _present_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, module) of the submodules of this stage."""
        for name, module in self.named_modules():
            if not isinstance(module, SkippedLayer):
                yield name, module

    def tied_parameters(self) -> dict[str, str]:
        """Return the tied parameters: {name: name of the original}."""
        return {}

    def tied_replicas(self) -> dict[str, str]:
        """Return parameters whose tied original is in a different stage: {name: original name}.

        The copy and the original receive the same gradient, so that their values stay equal.
        """
        return {}

    def tie_parameters(self) -> None:
        """Restore tied parameters, which materialization from the meta device separates."""
        for target, source in self.tied_parameters().items():
            owner, _, leaf = target.rpartition(".")
            setattr(self.get_submodule(owner), leaf, self.get_parameter(source))


def _name_expression(pattern: str) -> re.Pattern[str]:
    """Return the expression of a name pattern, in which "*" matches one name part."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _forward_flops(linears: LinearSizes) -> int:
    """Return the FLOPs of the forward pass of one unit."""
    return sum(2 * inputs * outputs for inputs, outputs in linears)


def _count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _describe_adapters(
    layer: nn.Module, styles: Mapping[nn.Module, str]
) -> tuple[AdapterSizes, ...]:
    """Return the shapes of the low-rank matrices in a layer.

    Args:
        layer: Transformer layer.
        styles: Maps linear layers to styles of `LayeredModule.tensor_parallel_plan`.
    """
    descriptions = (_describe_adapter(linear, styles) for _, linear, _ in adapted_linears(layer))
    return tuple(sizes for sizes in descriptions if sizes is not None)


def _describe_adapter(linear: nn.Module, styles: Mapping[nn.Module, str]) -> AdapterSizes | None:
    """Return the shapes of the adapter of a linear layer, or None without an adapter."""
    lora = getattr(linear, CHILD, None)
    if lora is None or not isinstance(linear, nn.Linear):
        return None
    divided: dict[str, Literal["inputs", "outputs"]] = {"colwise": "outputs", "rowwise": "inputs"}
    return AdapterSizes(
        linear.in_features,
        linear.out_features,
        lora.spec.rank,
        divided.get(styles.get(linear, "")),
        lora.magnitude is not None,
    )


def named_units(
    module: nn.Module, layers_fqn: str, prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of each layer and of each maximal submodule without layers."""
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        if layers_fqn == fqn or layers_fqn.startswith(f"{fqn}."):
            if layers_fqn == fqn:
                yield from ((f"{fqn}.{i}", layer) for i, layer in child.named_children())
            else:
                yield from named_units(child, layers_fqn, f"{fqn}.")
        else:
            yield fqn, child
