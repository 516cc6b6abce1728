"""Connectors: projections from encoder outputs to LLM embeddings.

`MlpConnector` has the structure and parameter names of the LLaVA projector, so that a CLIP or
SigLIP encoder with any LLM is a LLaVA checkpoint. The other connectors are those of other
multimodal models. Each forward maps features (K, D_in) to embeddings (K, D_llm).

Shape legend: P encoder outputs of all images, K tokens after folding, N images, R rows and C
columns of tokens of an image, D features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.mistral3.modeling_mistral3 import Mistral3RMSNorm

from torchmm.common.tiles import TileDownsample, TileRegion, interpolation_weights


class MlpConnector(nn.Module):
    """Two linear layers with an activation between them: (K, D_in) -> (K, D_llm)."""

    def __init__(self, in_features: int, out_features: int, act: str = "gelu", bias: bool = True):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, out_features, bias=bias)
        self.act = ACT2FN[act]
        self.linear_2 = nn.Linear(out_features, out_features, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings (K, D_llm) for features (K, D_in)."""
        return self.linear_2(self.act(self.linear_1(hidden_states)))


class NewlineMlpConnector(MlpConnector):
    """The LLaVA-NeXT connector, which drops padding of tiled images and adds newline embeddings."""

    def __init__(self, in_features: int, out_features: int, act: str = "gelu", bias: bool = True):
        super().__init__(in_features, out_features, act, bias)
        self.image_newline = nn.Parameter(torch.empty(out_features))

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, side: int, kept: list[TileRegion] | None
    ) -> Tensor:
        """Return the embeddings (K, D_llm) of the kept tokens of all images.

        Args:
            hidden_states: (N * `side` * `side`, D_in), features of all images.
            side: Number of tokens per row and column of an image.
            kept: Kept box of each image and its newlines. None keeps all tokens.
        """
        features_NRCD = super().forward(hidden_states).unflatten(0, (-1, side, side))
        if kept is None:
            kept = [TileRegion(0, side, 0, side, 0)] * len(features_NRCD)
        parts = []
        for features_RCD, box in zip(features_NRCD, kept, strict=True):
            inner_RCD = features_RCD[box.top : box.bottom, box.left : box.right]
            if box.downsample is not None:
                inner_RCD = _shrink(inner_RCD, box.downsample)
            parts.append(inner_RCD.flatten(0, 1))
            # Also appended if there are 0 line ends, so that the embedding always has a gradient.
            parts.append(self.image_newline.expand(box.line_ends, -1).to(features_RCD.dtype))
        return torch.cat(parts)


class MergeMlpConnector(nn.Module):
    """The Mistral 3 connector: a norm, and a linear layer that merges n x n adjacent patches.

    Its input (K, n n D_in) has the features of the n x n patches concatenated.

    Args:
        in_features: Features D_in of a patch.
        out_features: Features D_llm of the embeddings.
        num_merged_patches: Number n n of merged patches.
        act: Name of the activation.
        bias: Whether the linear layers have a bias.
        eps: Epsilon of the norm.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_merged_patches: int,
        act: str,
        bias: bool,
        eps: float,
    ) -> None:
        super().__init__()
        self.norm = Mistral3RMSNorm(in_features, eps)
        merging = nn.Linear(num_merged_patches * in_features, in_features, bias=False)
        self.patch_merger = nn.ModuleDict({"merging_layer": merging})
        self.linear_1 = nn.Linear(in_features, out_features, bias=bias)
        self.act = ACT2FN[act]
        self.linear_2 = nn.Linear(out_features, out_features, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings (K, D_llm) for concatenated patch features (K, n n D_in)."""
        x_KND = self.norm(hidden_states.unflatten(1, (-1, self.linear_1.in_features)))
        merged = self.patch_merger["merging_layer"](x_KND.transpose(1, 2).flatten(1))
        return self.linear_2(self.act(self.linear_1(merged)))


class NormMlpConnector(nn.Module):
    """The InternVL connector: a norm before two linear layers."""

    def __init__(self, in_features: int, out_features: int, act: str = "gelu"):
        super().__init__()
        self.layer_norm = nn.LayerNorm(in_features)
        self.mlp = MlpConnector(in_features, out_features, act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings (K, D_llm) for features (K, D_in)."""
        return self.mlp(self.layer_norm(hidden_states))


class LinearConnector(nn.Module):
    """The connector of PaliGemma and Idefics3: one linear layer."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings (K, D_llm) for features (K, D_in)."""
        return self.linear(hidden_states)


class ScaledLinearConnector(LinearConnector):
    """The Gemma 4 connector: a fixed scale, a norm without weights, one linear layer.

    Args:
        in_features: Features D_in.
        out_features: Features D_llm.
        eps: Epsilon of the norm.
        standardized: Whether features are standardized by constants, which are encoder weights in
            files. The subtracted constants are large, so this is computed in float32.
    """

    def __init__(self, in_features: int, out_features: int, eps: float, standardized: bool):
        super().__init__(in_features, out_features, bias=False)
        self.eps = eps
        self.standardized = standardized
        if standardized:
            self.std_bias = nn.Buffer(torch.empty(in_features))
            self.std_scale = nn.Buffer(torch.empty(in_features))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings (K, D_llm) for features (K, D_in)."""
        wide = hidden_states.float() * hidden_states.shape[-1] ** 0.5
        if self.standardized:
            wide = (wide - self.std_bias.float()) * self.std_scale.float()
            wide = wide.to(hidden_states.dtype).float()  # as the Hugging Face encoder returns it
        normed = functional.rms_norm(wide, wide.shape[-1:], eps=self.eps)
        return super().forward(normed.to(hidden_states.dtype))


class OmniAudioProjection(nn.Module):
    """The two linear layers after the audio encoder of Qwen3-Omni: (K, D_in) -> (K, D_llm)."""

    def __init__(self, proj1: nn.Module, act: nn.Module, proj2: nn.Module) -> None:
        super().__init__()
        self.proj1 = proj1
        self.act = act
        self.proj2 = proj2

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings (K, D_llm) for features (K, D_in)."""
        return self.proj2(self.act(self.proj1(hidden_states)))


class NormAudioProjection(nn.Module):
    """The norm and linear layer after the audio encoder of Qwen2.5-Omni: (K, D_in) -> (K, D_llm).

    Parameter names are those of the encoder.
    """

    def __init__(self, ln_post: nn.Module, proj: nn.Module) -> None:
        super().__init__()
        self.ln_post = ln_post
        self.proj = proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings (K, D_llm) for features (K, D_in)."""
        return self.proj(self.ln_post(hidden_states))


class PoolConnector(nn.Module):
    """The Gemma 3 connector: mean of folded patches, norm, projection."""

    def __init__(self, in_features: int, num_merged_patches: int, out_features: int, eps: float):
        super().__init__()
        features = in_features // num_merged_patches
        self.num_merged_patches = num_merged_patches
        self.mm_input_projection_weight = nn.Parameter(torch.empty(features, out_features))
        self.mm_soft_emb_norm = Gemma3RMSNorm(features, eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings (K, D_llm) for concatenated patch features (K, D_in)."""
        pooled = hidden_states.unflatten(-1, (self.num_merged_patches, -1)).mean(-2)
        return self.mm_soft_emb_norm(pooled) @ self.mm_input_projection_weight


def _shrink(features_RCD: Tensor, shrunk: TileDownsample) -> Tensor:
    """Return the contribution (Y, X, D) of a tile to the features of a downscaled image."""
    height, width = features_RCD.shape[:2]
    down_YR = interpolation_weights(*shrunk.rows)[slice(*shrunk.to_rows)]
    down_YR = down_YR[:, shrunk.from_row : shrunk.from_row + height]
    right_XC = interpolation_weights(*shrunk.columns)[slice(*shrunk.to_columns)]
    right_XC = right_XC[:, shrunk.from_column : shrunk.from_column + width]
    down = torch.from_numpy(down_YR).to(features_RCD)
    right = torch.from_numpy(right_XC).to(features_RCD)
    return torch.einsum("yr,xc,rcd->yxd", down, right, features_RCD)


def init_connector(module: nn.Module) -> bool:
    """Initialize a connector that the encoder class does not support. Return True if it is one."""
    if isinstance(module, PoolConnector):
        nn.init.normal_(module.mm_input_projection_weight, std=0.02)
    elif isinstance(module, ScaledLinearConnector) and module.standardized:
        nn.init.zeros_(module.std_bias)
        nn.init.ones_(module.std_scale)
    elif isinstance(module, Gemma3RMSNorm):  # the scale is 1 + weight
        nn.init.zeros_(module.weight)
    elif isinstance(module, NewlineMlpConnector):
        nn.init.normal_(module.image_newline, std=len(module.image_newline) ** -0.5)
    else:
        return False
    return True


def linear_sizes(module: nn.Module) -> list[tuple[int, int]]:
    """Return (input features, output features) of the linear layers of a module.

    The order is that of construction, which is the execution order in connectors.
    """
    return [sizes for _, sizes in iter_linears(module)]


def iter_linears(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[int, int]]]:
    """Yield submodules that compute a linear layer, with their input and output features."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            yield part, (part.in_features, part.out_features)
        elif isinstance(part, PoolConnector):
            features, out = part.mm_input_projection_weight.shape
            yield part, (features, out)
        elif isinstance(part, nn.Conv2d):  # without overlap, so one application per token
            yield part, (part.weight[0].numel(), part.out_channels)


def fold_patches(x_PD: Tensor, grids_thw: list[tuple[int, int, int]], size: int) -> Tensor:
    """Concatenate the features of `size` x `size` neighboring patches.

    Args:
        x_PD: (P, D), outputs of all images, each in row-major order.
        grids_thw: (frames, rows, columns) of each image. Rows and columns are multiples of `size`.
        size: Number of rows and columns of a group.

    Returns:
        Folded features (P / size**2, D * size**2), in row-major order.
    """
    features = x_PD.shape[-1]
    folded = []
    for (frames, rows, columns), image_PD in zip(
        grids_thw, x_PD.split([t * h * w for t, h, w in grids_thw]), strict=True
    ):
        grid = image_PD.view(frames, rows // size, size, columns // size, size, features)
        folded.append(grid.transpose(2, 3).reshape(-1, size * size * features))
    return torch.cat(folded)
