"""Search for the first module with a non-finite output after a NaN or infinite loss.

A NaN loss does not show its origin, and in a pipeline it appears on a different rank. Parameters
have not been updated and the batch is still available, so the step runs once more, with hooks that
check inputs and outputs of all modules. The search costs nothing until a loss is not finite.
`torch.autograd.detect_anomaly` would slow down every step, and must be enabled in advance.

Compiled layers run eagerly in the search. A second run without NaN is a hint, too: results of a
step change because of dropout, race conditions or faulty hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchmm.models.hf.load import local_tensor
from torchmm.parallel.gather import gather_floats, gather_texts

MAX_LISTED = 4
"""Maximum number of modules or parameters in the error message."""


class _OriginHooks:
    """Hooks that find the first module of this rank with a non-finite output."""

    def __init__(self) -> None:
        self.description = ""
        self.is_origin = False
        """Whether the inputs of the module are finite, so that it is the origin."""

    def hook(self, name: str) -> Callable[..., None]:
        """Return a forward hook for the module with a name."""

        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # Hooks of inner modules run before those of outer modules.
            if self.description or not _any(_is_bad, output):
                return
            self.is_origin = not _any(_is_bad_input, (args, kwargs))
            weights = [name for name, own in module.named_parameters() if _is_bad(own)]
            self.description = f"{name} ({type(module).__name__})"
            if weights:
                self.description += f", whose weights are not finite: {', '.join(weights[:4])}"
            elif not self.is_origin:
                self.description += ", whose input is not finite"

        return look


def find_non_finite_origin(model: nn.Module, run_again: Callable[[], object]) -> str:
    """Find the first non-finite value in a step that failed. Collective.

    Args:
        model: Model of this rank, with the gradients of the step.
        run_again: Runs forward and backward passes of the step, without an update. Collective.

    Returns:
        Description of the result, equal on all ranks.
    """
    # Backward passes run from the last to the first layer, so the last parameter is the origin.
    named = [(name, own.grad) for name, own in model.named_parameters() if own.grad is not None]
    bad = [name for name, gradient in named if _is_bad(gradient)]
    text = f"those of {len(bad)} of {len(named)} parameters, last {bad[-1]}" if bad else ""
    gradients = gather_texts(text)
    watch = _OriginHooks()
    with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(watch.hook(name), with_kwargs=True)
                stack.callback(handle.remove)
        run_again()
    origins = gather_texts(watch.description)
    begins = [began for [began] in gather_floats([float(watch.is_origin)])]
    modules = [f"{text} on rank {rank}" for rank, text in enumerate(origins) if text]
    first = [f"{text} on rank {rank}" for rank, text in enumerate(origins) if begins[rank]]
    if modules:
        return (
            "after running the step again, the first non-finite output is that of "
            f"{_join_texts(first or modules)}"
        )
    of_ranks = [f"{text} on rank {rank}" for rank, text in enumerate(gradients) if text]
    if of_ranks:
        return f"outputs of all modules are finite, but gradients are not: {_join_texts(of_ranks)}"
    return (
        "after running the step again, all values are finite; check dropout, race conditions and "
        "faulty hardware"
    )


def _join_texts(texts: list[str]) -> str:
    return "; ".join(texts[:MAX_LISTED]) + ("; ..." if len(texts) > MAX_LISTED else "")


def _any(is_bad: Callable[[Tensor], bool], values: Any) -> bool:
    return any(
        is_bad(leaf)
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def _is_bad(tensor: Tensor) -> bool:
    """Return True if values are not finite. Checks the local shard of a DTensor."""
    return not bool(torch.isfinite(local_tensor(tensor.detach())).all())


def _is_bad_input(tensor: Tensor) -> bool:
    """Return True if values are NaN or +inf. Masks can contain -inf."""
    local = local_tensor(tensor.detach())
    return bool((local.isnan() | local.isposinf()).any())
