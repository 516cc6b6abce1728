"""The vision tower of Qwen3-VL and Qwen3.5: learned positions besides rotary ones, and in Qwen3-VL
layers whose outputs go to the LLM beside the last one's (deepstack).

Learned positions are a square table, interpolated to each image's grid; which of its rows with
which weights is computed on the host, from the grids. A clip is several images, one for each group
of frames that make a patch: its frames never attended to each other, and their LLM reads the time
of each from the text in front of it.

Shape legend: P patches of all images, D features.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from torchmm.common.batch import EncoderInputs
from torchmm.common.device_copies import to_device
from torchmm.models.families.encoders.family import frame_starts
from torchmm.models.families.encoders.qwen import QwenVisionFamily
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.deepstack import DeepstackConnector


class Qwen3Context(NamedTuple):
    """Grids of a microbatch as the layers need them, and what precedes the layers."""

    frames: Segments
    rotary: tuple[Tensor, Tensor]
    rows: Tensor
    """int64 (P, 4): rows of the table of positions around each patch."""
    weights: Tensor
    """float32 (P, 4): of these rows."""


class Qwen3VisionFamily(QwenVisionFamily):
    """Qwen3-VL's tower; the base of those without deepstack, whose configs name no layers."""

    pre = ("patch_embed", "pos_embed")
    unused: tuple[str, ...] = ("deepstack_merger_list",)  # without the LLM that they are made for
    splits_clips = True
    merger_styles: ClassVar[dict[str, str]] = {
        f"{merger}.{part}": style
        for merger in ("merger", "deepstack_merger_list.*")
        for part, style in (("linear_fc1", "colwise"), ("linear_fc2", "rowwise"))
    }
    merger_norms: tuple[str, ...] = ("merger", "deepstack_merger_list.*")
    tensor_parallel: ClassVar[dict[str, str]] = {
        "attn": "packed_qkv",
        "attn.proj": "rowwise",
        "mlp.linear_fc1": "colwise",
        "mlp.linear_fc2": "rowwise",
        "norm1": "sequence",
        "norm2": "sequence",
    }
    tower: ClassVar[Any] = Qwen3VLVisionModel

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> Any:
        rows, weights = get_vision_interpolation_indices_and_weights(
            torch.tensor(inputs.grids_thw),
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            tower.config.spatial_merge_size,
        )
        return Qwen3Context(
            Segments.from_starts(frame_starts(inputs.grids_thw), device),
            self._rotary(tower, inputs, device),
            to_device(rows, device),
            to_device(weights, device),
        )

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        x_PD = tower.patch_embed(inputs.pixels)
        positions_PD = (tower.pos_embed(context.rows) * context.weights[..., None]).sum(1)
        return x_PD + positions_PD.to(x_PD.dtype)

    def taps(self, config: Any) -> tuple[int, ...]:
        return tuple(getattr(config, "deepstack_visual_indexes", None) or ())

    def take_merger(self, tower: Any) -> nn.Module:
        mergers = getattr(tower, "deepstack_merger_list", None)
        connector = DeepstackConnector(tower.merger, mergers)
        tower.merger = None
        if mergers is not None:
            tower.deepstack_merger_list = None
        return connector


class Qwen3MoeVisionFamily(Qwen3VisionFamily):
    """The same in front of experts."""

    tower: ClassVar[Any] = Qwen3VLMoeVisionModel


class Qwen3p5VisionFamily(Qwen3VisionFamily):
    """Qwen3.5's: the same without deepstack."""

    unused = ()
    merger_styles: ClassVar[dict[str, str]] = {
        "merger.linear_fc1": "colwise",
        "merger.linear_fc2": "rowwise",
    }
    merger_norms = ("merger",)
    tower: ClassVar[Any] = Qwen3_5VisionModel


class Qwen3p5MoeVisionFamily(Qwen3p5VisionFamily):
    """The same in front of experts."""

    tower: ClassVar[Any] = Qwen3_5MoeVisionModel
