"""An image encoder with its connector, behind the layered interface.

Shape legend: P patches of all images, K output tokens of all images, D features.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from torchmm.batch import EncoderInputs, ImageMeta, ImageSpec, LayerDescription
from torchmm.models.connectors import MlpConnector, fold_neighbours
from torchmm.models.encoder_families import EncoderFamily
from torchmm.models.layered import LayeredModule, LinearSizes, WeightFiles


@dataclass(frozen=True)
class EncoderSpec:
    """Everything that determines an encoder module, apart from its weights."""

    name: str
    family: EncoderFamily
    config: PreTrainedConfig
    """Configuration of the tower."""
    processor_class: str
    processor: dict[str, Any]
    llm_hidden_size: int
    dtype: torch.dtype
    feature_layer: int = -1
    """Which hidden state leaves the tower: -1 the last layer's output."""
    shuffle: int = 1
    """Rows and columns of patches folded into one token in front of the connector."""
    drop_class_token: bool = True
    own_merger: bool = False
    """The connector is the tower's own merger, not a new MLP."""
    connector_act: str = "gelu"
    connector_bias: bool = True
    connector_from_files: bool = False
    """Whether the weight files hold the connector; else it is new and starts at random."""


class EncoderModule(LayeredModule):
    """A tower, cut behind its feature layer, and the connector into the LLM's embeddings."""

    kind = "encoder"

    def __init__(self, spec: EncoderSpec, weights: WeightFiles) -> None:
        super().__init__(spec.name, weights)
        self.spec = spec
        self.family = spec.family
        self.layers_fqn = f"tower.{spec.family.layers}"
        self.tower: Any = self.uncut_tower()
        self.connector = self._build_connector()
        self._around = self._list_linears_around()
        self._remove_unused()

    def _build_connector(self) -> nn.Module:
        spec = self.spec
        if spec.own_merger:
            merger = self.tower.merger
            self.tower.merger = None
            return merger
        size = self.family.output_size(spec.config) * spec.shuffle**2
        hidden, act = spec.llm_hidden_size, spec.connector_act
        return MlpConnector(size, hidden, act, spec.connector_bias).to(spec.dtype)

    def _remove_unused(self) -> None:
        """Remove what no output depends on, so that nobody shards, gathers or optimizes it."""
        before = set(self.state_dict())
        every = self._layer_list()
        del every[len(every) + 1 + self.spec.feature_layer :]
        for name in self.family.unused:
            if hasattr(self.tower, name):
                setattr(self.tower, name, None)
        self.unused = before - set(self.state_dict())

    @property
    def hf(self) -> PreTrainedModel:
        return self.tower

    @property
    def new_connector(self) -> bool:
        return not self.spec.connector_from_files

    def uncut_tower(self) -> PreTrainedModel:
        """The tower with everything Hugging Face's class has, on the current default device."""
        # Copied, because building writes dtype and attention function into the config.
        return self.family.build(copy.deepcopy(self.spec.config), self.spec.dtype)

    def rebuild(self) -> EncoderModule:
        return EncoderModule(self.spec, self.weights)

    def _pre_fqns(self) -> tuple[str, ...]:
        return tuple(f"tower.{name}" for name in self.family.pre)

    def _post_fqns(self) -> tuple[str, ...]:
        inner = ("tower.merger",) if self.family.fixed_merge and not self.spec.own_merger else ()
        return (*inner, "connector")

    def _tensor_parallel_styles(self) -> dict[str, str]:
        plan = self.family.tensor_parallel
        styles = {f"{self.layers_fqn}.*.{name}": style for name, style in plan.items()}
        first, second = ("mlp.0", "mlp.2") if self.spec.own_merger else ("linear_1", "linear_2")
        return styles | {f"connector.{first}": "colwise", f"connector.{second}": "rowwise"}

    def _describe_layer(self, index: int) -> LayerDescription:
        return self.family.describe_layer(self.spec.config, index)

    @property
    def merge(self) -> int:
        return self.family.merge(self.spec.config) * self.spec.shuffle

    def _flops_around(self) -> tuple[int, int]:
        before, behind = self._around
        return sum(2 * i * o for i, o in before), sum(2 * i * o for i, o in behind)

    def _linears_around(self) -> tuple[LinearSizes, LinearSizes]:
        return self._around

    def _list_linears_around(self) -> tuple[LinearSizes, LinearSizes]:
        weight = self.tower.get_submodule(self.family.patch_embedding).weight
        behind = [self.get_submodule(fqn) for fqn in self._post_fqns()]
        linears = [m for part in behind for m in part.modules() if isinstance(m, nn.Linear)]
        before = (weight.numel() // len(weight), len(weight))
        return (before,), tuple((m.in_features, m.out_features) for m in linears)

    @property
    def extra_tokens(self) -> int:
        return int(self.family.has_class_token)

    @property
    def dummy_patches(self) -> int:
        return self.dummy_image().patches

    def forward(self, inputs: EncoderInputs, hidden: Tensor | None = None) -> Tensor:
        """Images to tokens.

        Args:
            inputs: the encoder's share of a microbatch; later stages read only its grids.
            hidden: later stages: hidden states from the stage before.

        Returns:
            Whole module or last stage: (K, D_llm). Earlier stages: hidden states, (N, S, D) for
            fixed layouts, (1, P, D) or (P, D) for packed patches.
        """
        family, tower = self.family, self.tower
        context = family.context(tower, inputs, inputs.pixels.device)
        if self.is_first:
            hidden = family.embed(tower, inputs, context)
        assert hidden is not None
        for index, layer in self.indexed_layers():
            hidden = family.run_layer(tower, index, layer, hidden, context)
        if not self.is_last:
            return hidden
        x_PD = family.finish(tower, hidden, context, self._drops_class_token)
        if self.spec.shuffle > 1:
            x_PD = fold_neighbours(x_PD, inputs.grids_thw, self.spec.shuffle)
        return self.connector(x_PD)

    @property
    def _drops_class_token(self) -> bool:
        return self.family.has_class_token and self.spec.drop_class_token

    def image_spec(self) -> ImageSpec:
        """How data has to prepare this encoder's images."""
        kept = self.family.has_class_token and not self.spec.drop_class_token
        return ImageSpec(
            encoder=self.name,
            layout=self.family.layout,
            processor_class=self.spec.processor_class,
            processor=self.spec.processor,
            patch_size_px=self.spec.config.patch_size,
            merge=self.merge,
            drop_class_token=not kept,
            extra_tokens=int(kept),
        )

    def dummy_image(self) -> ImageMeta:
        """Sizes of the image in `dummy_inputs`."""
        _, grid = self.family.smallest_image(self.spec.config)
        patches = prod(grid)
        kept = self.family.has_class_token and not self.spec.drop_class_token
        return ImageMeta(0, 0, patches, patches // self.merge**2 + kept)

    def dummy_inputs(self, device: torch.device) -> EncoderInputs:
        """The smallest valid image, whose tokens go nowhere: for microbatches without images."""
        shape, grid = self.family.smallest_image(self.spec.config)
        nowhere = torch.empty(0, dtype=torch.int64, device=device)
        return EncoderInputs(torch.zeros(shape, device=device), [grid], nowhere)
