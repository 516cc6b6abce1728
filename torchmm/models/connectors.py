"""From encoder outputs to LLM embeddings.

`MlpConnector` has the layout and names of LLaVA's projector, so a CLIP or SigLIP encoder with any
LLM is a LLaVA checkpoint.

Shape legend: P encoder outputs of all images, K tokens after folding, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN


class MlpConnector(nn.Module):
    """Two linear layers with an activation between them: (K, D_in) -> (K, D_llm)."""

    def __init__(self, in_features: int, out_features: int, act: str = "gelu", bias: bool = True):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, out_features, bias=bias)
        self.act = ACT2FN[act]
        self.linear_2 = nn.Linear(out_features, out_features, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(hidden_states)))


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
