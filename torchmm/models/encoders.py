"""An image or audio encoder with its connector, with the interface of `LayeredModule`.

Audio is represented as an image with one row (`torchmm.common.batch.ImageMeta`).

Shape legend: N images of one size, S positions of an image in the layers, P patches of all images,
K output tokens of all images, D features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedConfig, PreTrainedModel

from torchmm.common.batch import EncoderInputs, ImageMeta, ImageSpec
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.common.tiles import TileSpec
from torchmm.models.encoder_graphs import EncoderGraphs
from torchmm.models.families.encoders.family import EncoderFamily
from torchmm.models.layered import LayeredModule, WeightFiles, WeightInitializer
from torchmm.models.layers.connectors import (
    LinearConnector,
    MergeMlpConnector,
    MlpConnector,
    NewlineMlpConnector,
    NormMlpConnector,
    PoolConnector,
    ScaledLinearConnector,
    init_connector,
    linear_sizes,
)
from torchmm.models.layers.patch_embedding import patch_embed_as_matmul


@dataclass(frozen=True)
class EncoderSpec:
    """Settings of an encoder module, without its weights."""

    name: str
    family: EncoderFamily
    config: PreTrainedConfig
    """Hugging Face config of the encoder."""
    processor_class: str
    processor: dict[str, Any]
    tiles: TileSpec | None
    """Tiling of images before the processor, or None without tiles."""
    llm_hidden_size: int
    dtype: torch.dtype
    feature_layer: int = -1
    """Index of the hidden state that the connector reads. -1 is the output of the last layer."""
    pixel_shuffle_factor: int = 1
    """Number of patch rows and columns folded into one token before the connector.

    For audio, shuffle**2 consecutive positions are folded.
    """
    drop_class_token: bool = True
    final_norm: bool = False
    """Whether to apply the norm after the last layer."""
    connector: Literal[
        "mlp", "line_mlp", "norm_mlp", "merge_mlp", "linear", "scaled_linear", "pool", "merger"
    ] = "mlp"
    """Connector type. "merger" is the patch merger of the Hugging Face encoder."""
    connector_act: str = "gelu"
    connector_bias: bool = True
    connector_eps: float = 1e-6
    connector_from_files: bool = False
    """Whether the weight files contain the connector. Otherwise, it is initialized randomly."""


class EncoderModule(LayeredModule):
    """An encoder up to its feature layer, and the connector to the embeddings of the LLM.

    Attributes:
        spec: Settings of the encoder.
        family: Model family of the encoder.
        tower: Hugging Face encoder model.
        connector: Projection to the hidden size of the LLM.
        graphs: CUDA graphs of the layers, or None before `enable_cuda_graphs`.
    """

    kind = "encoder"

    def __init__(self, spec: EncoderSpec, weights: WeightFiles) -> None:
        family = spec.family
        weights = replace(
            weights, legacy_names=family.legacy_names, fused_tensors=family.fused_tensors
        )
        super().__init__(spec.name, replace(weights, optional_suffixes=family.optional_suffixes))
        self.spec = spec
        self.is_connector_new = not spec.connector_from_files
        self.family = spec.family
        self.supports_tensor_parallel = spec.family.is_registered
        self.layers_fqn = f"tower.{spec.family.layers}"
        self.tower: Any = self.build_full_encoder()
        self.deepstack_layers = (
            spec.family.deepstack_layers(spec.config) if spec.connector == "merger" else ()
        )
        # Releases of transformers sometimes rename submodules of layers.
        known = {name for name, _ in self._layer_list()[0].named_modules()}
        missing = [name for name in family.styles(spec.config) if name not in known]
        if missing:
            raise ConfigError(
                f"encoder {self.name!r}: layers of {spec.config.model_type!r} have no "
                f"{', '.join(missing)} in transformers {transformers.__version__}; this "
                "family does not support that version, install 5.23"
            )
        self.connector = self._build_connector()
        self.graphs: EncoderGraphs | None = None
        after = [self.get_submodule(fqn) for fqn in self._post_fqns()]
        sizes_after = tuple(sizes for part in after for sizes in linear_sizes(part))
        self.linears_outside_layers = family.linears_before(self.tower), sizes_after
        self.connector_linears = len(linear_sizes(self.connector))
        self._remove_unused()

    def _build_connector(self) -> nn.Module:
        spec = self.spec
        if spec.connector == "merger":
            return self.family.detach_merger(self.tower)
        size = self.family.output_size(spec.config)
        hidden = spec.llm_hidden_size
        folded = size * spec.pixel_shuffle_factor**2
        connector: nn.Module
        if spec.connector == "linear":
            connector = LinearConnector(folded, hidden, spec.connector_bias)
        elif spec.connector == "scaled_linear":
            standardized = spec.config.standardize
            connector = ScaledLinearConnector(folded, hidden, spec.connector_eps, standardized)
            for moved_name in ("pooler", "std_bias", "std_scale"):
                setattr(self.tower, moved_name, None)
        elif spec.connector == "pool":
            connector = PoolConnector(
                folded, spec.pixel_shuffle_factor**2, hidden, spec.connector_eps
            )
        elif spec.connector == "norm_mlp":
            connector = NormMlpConnector(folded, hidden, spec.connector_act)
        elif spec.connector == "merge_mlp":
            settings = (spec.connector_act, spec.connector_bias, spec.connector_eps)
            connector = MergeMlpConnector(size, hidden, spec.pixel_shuffle_factor**2, *settings)
        elif spec.connector == "line_mlp":
            connector = NewlineMlpConnector(folded, hidden, spec.connector_act, spec.connector_bias)
        else:
            connector = MlpConnector(folded, hidden, spec.connector_act, spec.connector_bias)
        return connector.to(spec.dtype)

    def _remove_unused(self) -> None:
        """Remove modules that do not affect outputs, so that they are not sharded or optimized."""
        before = set(self.state_dict())
        all_layers = self._layer_list()
        del all_layers[len(all_layers) + 1 + self.spec.feature_layer :]
        norm = () if self.spec.final_norm else (self.family.final_norm,)
        for fqn in (*self.family.unused, *norm):
            owner, _, leaf = fqn.rpartition(".")
            part = self.tower.get_submodule(owner)
            if leaf and hasattr(part, leaf):
                setattr(part, leaf, None)
        self.unused = before - set(self.state_dict())

    @property
    def hf(self) -> WeightInitializer:
        return _Initializer(self.tower, self.family.unused)

    def build_full_encoder(self) -> PreTrainedModel:
        """Build the complete Hugging Face encoder on the current default device."""
        # Copied, because building writes dtype and attention function into the config.
        tower = self.family.build(copy.deepcopy(self.spec.config), self.spec.dtype)
        if self.family.modality == "image":
            patch_embed_as_matmul(tower.get_submodule(self.family.patch_embedding))
        return tower

    def build_without_adapters(self) -> EncoderModule:
        return EncoderModule(self.spec, self.weights)

    def _pre_fqns(self) -> tuple[str, ...]:
        return tuple(f"tower.{name}" for name in self.family.pre)

    def _post_fqns(self) -> tuple[str, ...]:
        inner = []
        if self.spec.final_norm:
            inner.append(f"tower.{self.family.final_norm}")
        if self.spec.connector != "merger":
            inner += [f"tower.{name}" for name in self.family.merger]
        return (*inner, "connector")

    def _tensor_parallel_styles(self) -> dict[str, str]:
        plan = self.family.styles(self.spec.config)
        styles = {f"{self.layers_fqn}.*.{name}": style for name, style in plan.items()}
        pairs = {
            "mlp": ("linear_1", "linear_2"),
            "line_mlp": ("linear_1", "linear_2"),
            "merge_mlp": ("linear_1", "linear_2"),
            "norm_mlp": ("mlp.linear_1", "mlp.linear_2"),
        }
        if self.spec.connector in pairs:  # the other connectors have one small linear layer
            first, second = pairs[self.spec.connector]
            styles |= {f"connector.{first}": "colwise", f"connector.{second}": "rowwise"}
        elif self.spec.connector == "merger":
            styles |= {f"connector.{n}": style for n, style in self.family.merger_styles.items()}
        return styles

    def _norm_patterns(self) -> tuple[str, ...]:
        if self.spec.connector == "merge_mlp":
            return ("connector",)
        return tuple(f"connector.{name}" for name in self.family.merger_norms)

    def _describe_layer(self, index: int) -> LayerDescription:
        return self.family.describe_layer(self.spec.config, index)

    @property
    def connector_norm(self) -> bool:
        """True if the first weighted submodule of the connector is a norm."""
        parts = islice(self.connector.modules(), 1, None)  # submodules run before own parameters
        weighted = (p for p in parts if list(p.parameters(recurse=False)))
        return "Norm" in type(next(weighted, None)).__name__

    @property
    def merge(self) -> int:
        """Number of patches per token along rows and columns (`ImageSpec.merge`)."""
        return self.family.merge(self.spec.config) * self.spec.pixel_shuffle_factor

    @property
    def patches_per_token(self) -> int:
        return self.image_spec().patches_per_token

    @property
    def input_value_bytes(self) -> int:
        """Bytes per input value: 1 for pixels (uint8), 4 for audio (float32)."""
        return 1 if self.family.modality == "image" else 4

    @property
    def extra_tokens(self) -> int:
        return self.family.num_prefix_tokens(self.spec.config)

    @property
    def dummy_patches(self) -> int:
        return self.dummy_image().patches

    @property
    def output_features(self) -> int:
        """Features of an output token: (1 + number of taps) times the LLM hidden size."""
        return (1 + len(self.deepstack_layers)) * self.spec.llm_hidden_size

    def forward(
        self, inputs: EncoderInputs, stage_input: Tensor | tuple[Tensor, ...] | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the output tokens of images, or the output of this stage.

        Args:
            inputs: Images of the encoder in a microbatch, with float32 pixels. Later stages read
                only the grids.
            stage_input: Later stages: output of the previous stage.

        Returns:
            Last stage: (K, `output_features`). Earlier stages: hidden states, (N, S, D) for images
            of one size, (1, P, D) or (P, D) for packed patches, or the slice of a rank. After
            tapped layers: a tuple of the hidden states and the outputs of these layers.
        """
        family = self.family
        tower = self.tower
        assert inputs.pixels.is_floating_point(), "bytes: EncoderInputs.values first"
        context = family.context(tower, inputs, inputs.pixels.device)
        if self.is_first:
            # Audio embeddings have channels first in memory. Residual sums would preserve this
            # memory format through all layers, and every norm would copy it.
            stage_input = family.embed(tower, inputs, context).contiguous()
        assert stage_input is not None
        hidden, *deepstack_layers = (
            (stage_input,) if isinstance(stage_input, Tensor) else stage_input
        )
        if not self.is_first:
            shape = family.hidden_shape(self.spec.config, [prod(g) for g in inputs.grids_thw])
            hidden = self.sequence_ops.from_previous_stage(hidden, shape[-2])
        if self.graphs is not None:
            hidden = self.graphs(hidden)
        else:
            hidden = self._run_layers(hidden, context, deepstack_layers)
        if not self.is_last:
            hidden = self.sequence_ops.to_next_stage(hidden)
            return (hidden, *deepstack_layers) if deepstack_layers else hidden
        # The output of the last layer is unsharded. Outputs of other layers may be slices.
        indices = [index for index, _ in self.indexed_layers()]
        unsharded = (
            deepstack_layers[-1:] if indices and indices[-1] in self.deepstack_layers else []
        )
        deepstack_layers = [
            *map(
                self.sequence_ops.all_gather,
                deepstack_layers[: len(deepstack_layers) - len(unsharded)],
            ),
            *unsharded,
        ]
        if self.spec.final_norm:
            hidden = tower.get_submodule(family.final_norm)(hidden)
        x_PD = family.finish(tower, hidden, context, self._drops_class_token)
        if self.deepstack_layers:
            return self.connector(x_PD, deepstack_layers)
        if self.spec.pixel_shuffle_factor > 1:
            x_PD = family.fold(x_PD, inputs.grids_thw, self.spec.pixel_shuffle_factor)
        if self.spec.connector == "line_mlp":
            return self.connector(
                x_PD, inputs.grids_thw[0][1] // self.spec.pixel_shuffle_factor, inputs.tile_regions
            )
        return self.connector(x_PD)

    def _run_layers(self, hidden: Tensor, context: Any, deepstack_layers: list[Tensor]) -> Tensor:
        """Return the output of the layers, and append DeepStack outputs to `deepstack_layers`."""
        for index, layer in self.indexed_layers():
            hidden = self.family.run_layer(self.tower, index, layer, hidden, context)
            if index in self.deepstack_layers:
                deepstack_layers.append(hidden)
        return hidden

    def enable_cuda_graphs(self) -> None:
        """Launch the layers as CUDA graphs, see `CompileConfig.reason_against_graphs`."""
        self.graphs = EncoderGraphs(
            self.name, self.layers, lambda hidden: self._run_layers(hidden, None, [])
        )

    @property
    def _drops_class_token(self) -> bool:
        return self.family.has_class_token and self.spec.drop_class_token

    def image_spec(self) -> ImageSpec:
        """Return the preparation settings of images or audio for this encoder."""
        keeps_class_token = self.family.has_class_token and not self.spec.drop_class_token
        return ImageSpec(
            encoder=self.name,
            inputs=self.family.inputs,
            processor_class=self.spec.processor_class,
            processor=self.spec.processor,
            patch_size_px=self.family.patch_size(self.spec.config),
            merge=self.merge,
            drop_class_token=not keeps_class_token,
            extra_tokens=int(keeps_class_token),
            modality=self.family.modality,
            max_patches=self.family.max_patches(self.spec.config),
            pooled=self.family.pooled,
            sound_chunks=self.family.sound_chunks(self.spec.config),
            tiles=self.spec.tiles,
            splits_clips=self.family.splits_clips,
            ends_lines=self.spec.connector == "line_mlp",
        )

    def dummy_image(self) -> ImageMeta:
        """Return the number of patches and tokens of the image in `dummy_inputs`."""
        patches = prod(self._smallest_input()[1])
        keeps_class_token = self.family.has_class_token and not self.spec.drop_class_token
        return ImageMeta(0, 0, patches, patches // self.patches_per_token + keeps_class_token)

    def _smallest_input(self) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """Return the pixel shape and the grid of the smallest valid image."""
        return self.family.smallest_folded(self.spec.config, self.spec.pixel_shuffle_factor)

    def dummy_inputs(self, device: torch.device) -> EncoderInputs:
        """Return the smallest valid image, for microbatches without images.

        No token of the LLM uses its output.
        """
        shape, grid = self._smallest_input()
        nowhere = torch.empty(0, dtype=torch.int64, device=device)
        return EncoderInputs(torch.zeros(shape, device=device), [grid], nowhere)


class _Initializer:
    """The weight initialization of a Hugging Face encoder and of connectors."""

    def __init__(self, tower: PreTrainedModel, unused: Sequence[str] = ()) -> None:
        self.tower = tower
        self.unused = {fqn.rpartition(".")[2] for fqn in unused}

    def _init_weights(self, module: nn.Module) -> None:
        if init_connector(module):
            return
        missing = [n for n, p in module._parameters.items() if p is None and n in self.unused]
        for name in missing:  # DINOv3 initializes its mask token without checking that it exists
            setattr(module, name, nn.Parameter(torch.empty(0)))
        self.tower._init_weights(module)
        for name in missing:
            setattr(module, name, None)
        if is_parametrized(module, "weight"):  # Hugging Face has filled only a computed copy
            assert isinstance(module, nn.Conv1d)  # positional convolution of Wav2Vec2
            std = 2 * (module.kernel_size[0] * module.in_channels) ** -0.5
            module.weight = torch.empty_like(module.weight).normal_(std=std)
