"""Into which pieces encoder layers divide, and how often LLM layers communicate.

An encoder's layers may run in pieces while the LLM communicates (`torchmm.balance.optimus.pieces`
says where they stop). A cost model knows times of whole actions: computation is divided among
pieces in proportion to FLOPs, those of attention between activations included; what stands between
products (norms, activation functions) goes along with these. A layer's collectives are equally
long.

Left out: what comes before the first layer and behind the last, which is no piece of its own;
windows that differ from layer to layer.
"""

from __future__ import annotations

from torchmm.balance.step_costs import LayerPieces, Piece
from torchmm.common.layers import LayerDescription
from torchmm.costs.execution import Execution
from torchmm.costs.layers import layer_flops, layer_linears
from torchmm.costs.sizes import TaskSizes

FORWARD_SHARE = 1 / 3
"""Of a backward that runs the layer again."""


def layer_pieces(layer: LayerDescription, sizes: TaskSizes, execution: Execution) -> LayerPieces:
    """Of an encoder's layer.

    Args:
        sizes: of all its tasks, whose mean counts.
    """
    linears = {name: float(a * b) for name, (a, b) in layer_linears(layer).items()}
    products = [
        sum(linears.get(name, 0.0) for name in names)
        for names in (("query", "key", "value"), ("attention_output",), ("gate", "up"), ("down",))
    ]
    dense_N, pairs_N = layer_flops(layer, sizes)
    dense = float(dense_N.sum())
    attention = sum(products) * float(pairs_N.sum()) / dense if dense else 0.0
    whole = (sum(products) + attention) or 1.0
    qkv, output, up, down = (product / whole for product in products)
    halves = (qkv, attention / whole, output), (up, 0.0, down)
    forward = [piece for half in halves for piece in _part(*half, execution)]
    backward = [piece for half in halves[::-1] for piece in _part(*half[::-1], execution)]
    if execution.recompute == "full":
        first = [Piece(FORWARD_SHARE * share, sends) for share, sends in forward]
        backward = first + [Piece((1 - FORWARD_SHARE) * share, sends) for share, sends in backward]
    return LayerPieces(tuple(forward), tuple(backward))


def layer_collectives(execution: Execution) -> tuple[int, int]:
    """Of an LLM layer's forward and backward."""
    if execution.tensor == 1 or execution.async_tensor:
        return 0, 0
    each = 4 if execution.sequence_parallel else 2
    return each, each * (2 if execution.recompute == "full" else 1)


def _part(first: float, inner: float, last: float, execution: Execution) -> list[Piece]:
    """Of an attention or a feed-forward part; backward has its products the other way round."""
    split = execution.tensor > 1
    gathers = [Piece(0.0, True)] if split and execution.sequence_parallel else []
    return [*gathers, Piece(first, False), Piece(inner, False), Piece(last, split)]
