"""Vision encoders of Qwen3-VL and Qwen3.5: learned and rotary positions, and DeepStack.

In Qwen3-VL, the LLM also reads outputs of other layers than the last (DeepStack).

Learned positions are a square table that is interpolated to the grid of each image. The host
computes table rows and weights of the interpolation from the grids.

A video is several images, one for each group of frames in a patch. Frames do not attend to each
other, and the LLM reads the time of each group from the text before it.

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
    """Inputs of layers and position embeddings that depend on the grids."""

    frames: Segments
    rotary: tuple[Tensor, Tensor]
    rows: Tensor
    """(P, 4), int64, rows of the position table around each patch."""
    weights: Tensor
    """(P, 4), float32, interpolation weights of `rows`."""


class Qwen3VisionFamily(QwenVisionFamily):
    """The encoder of Qwen3-VL, and the base class of encoders without DeepStack."""

    pre = ("patch_embed", "pos_embed")
    unused: tuple[str, ...] = ("deepstack_merger_list",)  # only for the LLM of Qwen3-VL
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

    def deepstack_layers(self, config: Any) -> tuple[int, ...]:
        return tuple(getattr(config, "deepstack_visual_indexes", None) or ())

    def detach_merger(self, tower: Any) -> nn.Module:
        mergers = getattr(tower, "deepstack_merger_list", None)
        connector = DeepstackConnector(tower.merger, mergers)
        tower.merger = None
        if mergers is not None:
            tower.deepstack_merger_list = None
        return connector


class Qwen3MoeVisionFamily(Qwen3VisionFamily):
    """The encoder of Qwen3-VL with a mixture-of-experts LLM."""

    tower: ClassVar[Any] = Qwen3VLMoeVisionModel


class Qwen3p5VisionFamily(Qwen3VisionFamily):
    """The encoder of Qwen3.5, without DeepStack."""

    unused = ()
    merger_styles: ClassVar[dict[str, str]] = {
        "merger.linear_fc1": "colwise",
        "merger.linear_fc2": "rowwise",
    }
    merger_norms = ("merger",)
    tower: ClassVar[Any] = Qwen3_5VisionModel


class Qwen3p5MoeVisionFamily(Qwen3p5VisionFamily):
    """The encoder of Qwen3.5 with a mixture-of-experts LLM."""

    tower: ClassVar[Any] = Qwen3_5MoeVisionModel
