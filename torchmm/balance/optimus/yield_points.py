"""Stop points of encoder layers, so that they run in pieces (Optimus §4.2).

Attention and MLP each stop after the last column-wise matmul (query, key and value; gate and up),
before the row-wise matmul, and after it:

    attention   q k v | scores | output |      MLP   gate up | activation | down |

If layers are split over ranks, they stop at the start of each of their collectives instead of after
the row-wise matmul. Backward passes stop when the gradients of the same tensors are ready. A layer
has six pieces, and eight pieces with sequence parallelism. `torchmm.balance.optimus.layer_pieces`
computes their durations.

Stop points follow from the tensor-parallel plan of the model family. Submodules outside this plan
are merged with the next piece.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchmm.models.layered import LayeredModule
from torchmm.parallel.tensor.collectives import Hook


def insert_yield_points(module: LayeredModule, stop: Hook, sends: bool) -> None:
    """Call a hook at each stop point of the layers of a module.

    Args:
        module: Encoder with decoder or encoder layers.
        stop: Function to call.
        sends: Whether layers are split over ranks, so that their collectives call the hook too.
    """
    plan = module.tensor_parallel_plan()
    rows = {
        submodule
        for pattern, s in plan.items()
        if s == "rowwise"
        for submodule in module.matching_submodules(pattern)
    }
    for pattern in module.tensor_parallel_scopes():
        if not pattern.startswith(f"{module.layers_fqn}."):
            continue
        for scope in module.matching_submodules(pattern):
            linears = [
                submodule for submodule in scope.modules() if isinstance(submodule, nn.Linear)
            ]
            if row_linears := [linear for linear in linears if linear in rows]:
                columns = [linear for linear in linears if linear not in rows]
                _insert_in_scope(scope, columns, row_linears, stop, sends)


def _insert_in_scope(
    scope: nn.Module, columns: list[nn.Linear], rows: list[nn.Linear], stop: Hook, sends: bool
) -> None:
    left = 0

    def start(*_: Any) -> None:
        nonlocal left
        left = len(columns)  # reset here, because recomputation can stop early

    def after_column(_: nn.Module, __: Any, product: Tensor) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            at(product)

    def at(x: Tensor) -> None:
        """Stop now, and in backward when the gradient of the tensor is ready."""
        stop()
        if x.requires_grad:
            x.register_hook(lambda _: stop())

    scope.register_forward_pre_hook(start)
    for linear in columns:
        linear.register_forward_hook(after_column)
    for linear in rows:
        linear.register_forward_pre_hook(lambda _, args: at(args[0]))
        if not sends:
            linear.register_forward_hook(lambda _, __, product: at(product))
