"""Pieces of encoder layers, and number of collectives of LLM layers.

Encoder layers can run in pieces while the LLM communicates. `torchmm.balance.optimus.yield_points`
defines the points at which they stop. The cost model has times of complete actions only.
Computation is divided among pieces in proportion to FLOPs, including those of attention scores.
Operations between matmuls (norms, activation functions) are part of the adjacent matmul. All
collectives of a layer have the same duration.

Computation before the first layer and after the last layer is not a separate piece. Attention
windows that differ between layers are ignored.
"""

from __future__ import annotations

from torchmm.balance.plan_costs import LayerPiece, LayerPieces
from torchmm.common.layers import LayerDescription
from torchmm.costs.execution import Execution
from torchmm.costs.layers import layer_flops, layer_linears
from torchmm.costs.sizes import TaskSizes

RECOMPUTE_FORWARD_FRACTION = 1 / 3
"""Fraction of a backward pass with recomputation that is the forward pass."""


def layer_pieces(layer: LayerDescription, sizes: TaskSizes, execution: Execution) -> LayerPieces:
    """Return the pieces of an encoder layer.

    Args:
        layer: Description of the layer.
        sizes: Sizes of all tasks. Their mean is used.
        execution: Parallelism and recomputation of the encoder.
    """
    linears = {name: float(a * b) for name, (a, b) in layer_linears(layer).items()}
    matmuls = [
        sum(linears.get(name, 0.0) for name in names)
        for names in (("query", "key", "value"), ("attention_output",), ("gate", "up"), ("down",))
    ]
    dense_N, pairs_N = layer_flops(layer, sizes)
    dense = float(dense_N.sum())
    attention = sum(matmuls) * float(pairs_N.sum()) / dense if dense else 0.0
    total = (sum(matmuls) + attention) or 1.0
    qkv, output, up, down = (flops / total for flops in matmuls)
    halves = (qkv, attention / total, output), (up, 0.0, down)
    forward = [piece for half in halves for piece in _block_pieces(*half, execution)]
    backward = [piece for half in halves[::-1] for piece in _block_pieces(*half[::-1], execution)]
    if execution.recompute == "full":
        first = [LayerPiece(RECOMPUTE_FORWARD_FRACTION * share, sends) for share, sends in forward]
        backward = first + [
            LayerPiece((1 - RECOMPUTE_FORWARD_FRACTION) * share, sends) for share, sends in backward
        ]
    return LayerPieces(tuple(forward), tuple(backward))


def layer_collectives(execution: Execution) -> tuple[int, int]:
    """Return the number of collectives of an LLM layer in forward and backward."""
    if execution.tensor == 1 or execution.async_tensor:
        return 0, 0
    each = 4 if execution.sequence_parallel else 2
    return each, each * (2 if execution.recompute == "full" else 1)


def _block_pieces(
    first: float, inner: float, last: float, execution: Execution
) -> list[LayerPiece]:
    """Return the pieces of attention or MLP. Backward passes have the matmuls in reverse order."""
    split = execution.tensor > 1
    gathers = [LayerPiece(0.0, True)] if split and execution.sequence_parallel else []
    return [*gathers, LayerPiece(first, False), LayerPiece(inner, False), LayerPiece(last, split)]
