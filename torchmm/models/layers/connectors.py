"""From encoder outputs to LLM embeddings.

`MlpConnector` has the layout and names of LLaVA's projector, so a CLIP or SigLIP encoder with any
LLM is a LLaVA checkpoint. The others are those of further composites.

Shape legend: P encoder outputs of all images, K tokens after folding, D features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.mistral3.modeling_mistral3 import Mistral3RMSNorm

from torchmm.common.tiles import Kept, Shrunk, shrink_weights


class MlpConnector(nn.Module):
    """Two linear layers with an activation between them: (K, D_in) -> (K, D_llm)."""

    def __init__(self, in_features: int, out_features: int, act: str = "gelu", bias: bool = True):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, out_features, bias=bias)
        self.act = ACT2FN[act]
        self.linear_2 = nn.Linear(out_features, out_features, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(hidden_states)))


class LineMlpConnector(MlpConnector):
    """LLaVA-NeXT's: drops padding of pictures cut into tiles, and ends their lines."""

    def __init__(self, in_features: int, out_features: int, act: str = "gelu", bias: bool = True):
        super().__init__(in_features, out_features, act, bias)
        self.image_newline = nn.Parameter(torch.empty(out_features))

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, side: int, kept: list[Kept] | None
    ) -> Tensor:
        """(K, D_llm): of each image what is kept of its `side` x `side` tokens."""
        features_NRCD = super().forward(hidden_states).unflatten(0, (-1, side, side))
        if kept is None:
            kept = [Kept(0, side, 0, side, 0)] * len(features_NRCD)
        parts = []
        for features_RCD, box in zip(features_NRCD, kept, strict=True):
            inner_RCD = features_RCD[box.top : box.bottom, box.left : box.right]
            if box.shrunk is not None:
                inner_RCD = _shrink(inner_RCD, box.shrunk)
            parts.append(inner_RCD.flatten(0, 1))
            # Also none of them, so that the embedding always has a gradient.
            parts.append(self.image_newline.expand(box.line_ends, -1).to(features_RCD.dtype))
        return torch.cat(parts)


class MergeMlpConnector(nn.Module):
    """Mistral 3's: n x n neighbours become one by a product, behind a norm of each:
    (K, n n D_in), neighbour after neighbour -> (K, D_llm).

    Args:
        in_features: D_in.
        neighbours: n n.
    """

    def __init__(
        self, in_features: int, out_features: int, neighbours: int, act: str, bias: bool, eps: float
    ) -> None:
        super().__init__()
        self.norm = Mistral3RMSNorm(in_features, eps)
        merging = nn.Linear(neighbours * in_features, in_features, bias=False)
        self.patch_merger = nn.ModuleDict({"merging_layer": merging})
        self.linear_1 = nn.Linear(in_features, out_features, bias=bias)
        self.act = ACT2FN[act]
        self.linear_2 = nn.Linear(out_features, out_features, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x_KND = self.norm(hidden_states.unflatten(1, (-1, self.linear_1.in_features)))
        merged = self.patch_merger["merging_layer"](x_KND.transpose(1, 2).flatten(1))
        return self.linear_2(self.act(self.linear_1(merged)))


class NormMlpConnector(nn.Module):
    """InternVL's: a norm before the two linear layers."""

    def __init__(self, in_features: int, out_features: int, act: str = "gelu"):
        super().__init__()
        self.layer_norm = nn.LayerNorm(in_features)
        self.mlp = MlpConnector(in_features, out_features, act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.mlp(self.layer_norm(hidden_states))


class LinearConnector(nn.Module):
    """One linear layer: PaliGemma's, Idefics3's."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.linear(hidden_states)


class ScaledLinearConnector(LinearConnector):
    """Gemma 4's: fixed scales, a norm without weights, one linear layer.

    Args:
        standardized: whether features are standardized by constants, which the files give to the
            tower. What is subtracted is large, so all of this is done in float32.
    """

    def __init__(self, in_features: int, out_features: int, eps: float, standardized: bool):
        super().__init__(in_features, out_features, bias=False)
        self.eps = eps
        self.standardized = standardized
        if standardized:
            self.std_bias = nn.Buffer(torch.empty(in_features))
            self.std_scale = nn.Buffer(torch.empty(in_features))

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float() * hidden_states.shape[-1] ** 0.5
        if self.standardized:
            wide = (wide - self.std_bias.float()) * self.std_scale.float()
            wide = wide.to(hidden_states.dtype).float()  # as Hugging Face's tower returns it
        normed = functional.rms_norm(wide, wide.shape[-1:], eps=self.eps)
        return super().forward(normed.to(hidden_states.dtype))


class SoundProjection(nn.Module):
    """The two linear layers behind Qwen3-Omni's tower for sounds: (K, D_in) -> (K, D_llm)."""

    def __init__(self, proj1: nn.Module, act: nn.Module, proj2: nn.Module) -> None:
        super().__init__()
        self.proj1 = proj1
        self.act = act
        self.proj2 = proj2

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.proj2(self.act(self.proj1(hidden_states)))


class NormProjection(nn.Module):
    """What Qwen2.5-Omni's tower for sounds ends with: a norm and a linear, (K, D_in) -> (K, D_llm).

    Names are the tower's."""

    def __init__(self, ln_post: nn.Module, proj: nn.Module) -> None:
        super().__init__()
        self.ln_post = ln_post
        self.proj = proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.proj(self.ln_post(hidden_states))


class PoolConnector(nn.Module):
    """Gemma 3's: mean of the folded neighbours, norm, projection."""

    def __init__(self, in_features: int, neighbours: int, out_features: int, eps: float):
        super().__init__()
        features = in_features // neighbours
        self.neighbours = neighbours
        self.mm_input_projection_weight = nn.Parameter(torch.empty(features, out_features))
        self.mm_soft_emb_norm = Gemma3RMSNorm(features, eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        pooled = hidden_states.unflatten(-1, (self.neighbours, -1)).mean(-2)
        return self.mm_soft_emb_norm(pooled) @ self.mm_input_projection_weight


def _shrink(features_RCD: Tensor, shrunk: Shrunk) -> Tensor:
    """What a tile adds to the features of a picture that is shrunk."""
    height, width = features_RCD.shape[:2]
    down_YR = shrink_weights(*shrunk.rows)[slice(*shrunk.to_rows)]
    down_YR = down_YR[:, shrunk.from_row : shrunk.from_row + height]
    right_XC = shrink_weights(*shrunk.columns)[slice(*shrunk.to_columns)]
    right_XC = right_XC[:, shrunk.from_column : shrunk.from_column + width]
    down = torch.from_numpy(down_YR).to(features_RCD)
    right = torch.from_numpy(right_XC).to(features_RCD)
    return torch.einsum("yr,xc,rcd->yxd", down, right, features_RCD)


def init_connector(module: nn.Module) -> bool:
    """Initialises a part that an encoder's own class does not know; returns whether it is one."""
    if isinstance(module, PoolConnector):
        nn.init.normal_(module.mm_input_projection_weight, std=0.02)
    elif isinstance(module, ScaledLinearConnector) and module.standardized:
        nn.init.zeros_(module.std_bias)
        nn.init.ones_(module.std_scale)
    elif isinstance(module, Gemma3RMSNorm):  # centred at 1
        nn.init.zeros_(module.weight)
    elif isinstance(module, LineMlpConnector):
        nn.init.normal_(module.image_newline, std=len(module.image_newline) ** -0.5)
    else:
        return False
    return True


def linear_sizes(module: nn.Module) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrix products of a connector or of whatever follows the layers, in
    the order in which its parts were made: that of their use."""
    return [sizes for _, sizes in linear_parts(module)]


def linear_parts(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[int, int]]]:
    """The same with the parts that they are of."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            yield part, (part.in_features, part.out_features)
        elif isinstance(part, PoolConnector):
            features, out = part.mm_input_projection_weight.shape
            yield part, (features, out)
        elif isinstance(part, nn.Conv2d):  # without overlap: once per token
            yield part, (part.weight[0].numel(), part.out_channels)


def fold_neighbours(x_PD: Tensor, grids_thw: list[tuple[int, int, int]], size: int) -> Tensor:
    """Concatenate the features of `size` x `size` neighbouring patches.

    Args:
        x_PD: outputs of all images, each in row-major order.
        grids_thw: (frames, rows, columns) of each image; multiples of `size`.

    Returns:
        (P / size**2, D * size**2), row-major order.
    """
    features = x_PD.shape[-1]
    folded = []
    for (frames, rows, columns), image_PD in zip(
        grids_thw, x_PD.split([t * h * w for t, h, w in grids_thw]), strict=True
    ):
        grid = image_PD.view(frames, rows // size, size, columns // size, size, features)
        folded.append(grid.transpose(2, 3).reshape(-1, size * size * features))
    return torch.cat(folded)
