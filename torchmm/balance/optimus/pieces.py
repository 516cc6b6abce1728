"""Places where encoder layers may stop, so that they run in pieces (Optimus §4.2).

Attention and MLP each stop after their last column-wise matmul (query, key and value; gate and up),
before their row-wise matmul, and after it. If layers are split over ranks, they stop at the start
of each of their collectives instead of after the row-wise matmul. Backward passes stop when the
gradients of the same tensors are ready. So a layer has six pieces, and eight with sequence
parallelism (`torchmm.balance.optimus.layer_pieces` has their durations).

The places follow from the tensor-parallel plan of the family. Parts that are not in this plan are
one piece with the part after them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchmm.models.layered import LayeredModule
from torchmm.parallel.tensor.collectives import Hook


def stop_in_layers(module: LayeredModule, stop: Hook, sends: bool) -> None:
    """Call a hook at each place where a layer of the module may stop.

    Args:
        sends: Whether layers are split over ranks, so that their collectives call the hook too.
    """
    plan = module.tensor_parallel_plan()
    rows = {
        part for pattern, s in plan.items() if s == "rowwise" for part in module.matching(pattern)
    }
    for pattern in module.tensor_parallel_scopes():
        if not pattern.startswith(f"{module.layers_fqn}."):
            continue
        for scope in module.matching(pattern):
            linears = [part for part in scope.modules() if isinstance(part, nn.Linear)]
            if own_rows := [linear for linear in linears if linear in rows]:
                columns = [linear for linear in linears if linear not in rows]
                _stop_in_scope(scope, columns, own_rows, stop, sends)


def _stop_in_scope(
    scope: nn.Module, columns: list[nn.Linear], rows: list[nn.Linear], stop: Hook, sends: bool
) -> None:
    left = 0

    def start(*_: Any) -> None:
        nonlocal left
        left = len(columns)  # set here, because recomputation may end before the last one

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
