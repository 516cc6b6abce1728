"""Where an encoder's layers may stop, so that they run in pieces
(`torchmm.parallel.tensor.bubbles`).

An attention and a feed-forward part each stop

- behind their last column-wise product (queries, keys and values; gate and up),
- in front of their row-wise product (behind attention, or the activation function),
- behind it, where nothing is sent, and otherwise at the begin of each of their collectives.

In backward they stop at the same tensors, when their gradients are there. So a layer is six pieces,
and eight where it gathers and scatters a sequence; `torchmm.balance.layer_pieces` says how long
they are. Found from the tensor-parallel plan of the family: what is split over ranks in the same
way has the same parts. A part that the plan says nothing of does not stop, and is one piece with
what comes after.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchmm.models.layered import LayeredModule
from torchmm.parallel.tensor.bubbles import Meanwhile


def stop_in_layers(module: LayeredModule, pause: Meanwhile, sends: bool) -> None:
    """Lets the module's layers stop.

    Args:
        pause: called at the end of each piece.
        sends: whether the layers are split over ranks, so that their collectives stop them too.
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
            columns = [linear for linear in linears if linear not in rows]
            own_rows = [linear for linear in linears if linear in rows]
            _stop_in(scope, columns, own_rows, pause, sends)


def _stop_in(
    scope: nn.Module, columns: list[nn.Linear], rows: list[nn.Linear], pause: Meanwhile, sends: bool
) -> None:
    left = 0

    def begin(*_: Any) -> None:
        nonlocal left
        left = len(columns)  # anew: what is run again in backward may end early

    def behind_column(_: nn.Module, __: Any, product: Tensor) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            _stop(product, pause)

    if not rows:
        return
    scope.register_forward_pre_hook(begin)
    for linear in columns:
        linear.register_forward_hook(behind_column)
    for linear in rows:
        linear.register_forward_pre_hook(lambda _, args: _stop(args[0], pause))
        if not sends:
            linear.register_forward_hook(lambda _, __, product: _stop(product, pause))


def _stop(x: Tensor, pause: Meanwhile) -> None:
    """Where this tensor is there, and where its gradient is."""
    pause()
    if x.requires_grad:
        x.register_hook(lambda _: pause())
