"""Where a number stopped being one: the first module whose output is not finite.

A loss of NaN says nothing about where it began, and in a pipeline it is seen on another rank than
the one it comes from. Parameters have not been updated and the batch is still there, so the step is
run once more with a look at what every module takes and gives. That costs nothing until a run ends
by it. Rejected: hooks that look at every step (`torch.autograd.detect_anomaly` and its like), which
make training several times slower, and have to be switched on before it happens.

Compiled layers run uncompiled then. A step that is finite the second time tells something, too:
what changes from one run to the next is dropout, races and broken hardware.
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

SHOWN = 4
"""Modules or parameters that a message lists."""


class _Watch:
    """Looks at all modules of a rank until the first one gives what is not finite."""

    def __init__(self) -> None:
        self.found = ""
        self.begins = False
        """Whether the module got finite numbers: then it began there."""

    def hook(self, name: str) -> Callable[..., None]:
        """To be called after the forward of the module of that name."""

        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # A module's hook is called after those of the modules inside of it: innermost first.
            if self.found or not _any(_is_bad, output):
                return
            self.begins = not _any(_is_bad_input, (args, kwargs))
            weights = [name for name, own in module.named_parameters() if _is_bad(own)]
            self.found = f"{name} ({type(module).__name__})"
            if weights:
                self.found += f", whose weights are not finite: {', '.join(weights[:4])}"
            elif not self.begins:
                self.found += ", whose input is not finite"

        return look


def where_non_finite(model: nn.Module, run_again: Callable[[], object]) -> str:
    """Where the numbers of a failed step stopped being finite; collective.

    Args:
        model: this rank's part of it, with the step's gradients.
        run_again: forward and backward of that step, without an update; as collective as it is.

    Returns:
        What is known of it, the same on all ranks.
    """
    # Backward goes from the last layer to the first, so the last one listed is the first bad one.
    named = [(name, own.grad) for name, own in model.named_parameters() if own.grad is not None]
    bad = [name for name, gradient in named if _is_bad(gradient)]
    text = f"those of {len(bad)} of {len(named)} parameters, last {bad[-1]}" if bad else ""
    gradients = gather_texts(text)
    watch = _Watch()
    with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(watch.hook(name), with_kwargs=True)
                stack.callback(handle.remove)
        run_again()
    found = gather_texts(watch.found)
    begins = [began for [began] in gather_floats([float(watch.begins)])]
    modules = [f"{text} on rank {rank}" for rank, text in enumerate(found) if text]
    first = [f"{text} on rank {rank}" for rank, text in enumerate(found) if begins[rank]]
    if modules:
        return (
            "after running the step again, the first non-finite output is that of "
            f"{_listed(first or modules)}"
        )
    of_ranks = [f"{text} on rank {rank}" for rank, text in enumerate(gradients) if text]
    if of_ranks:
        return f"outputs of all modules are finite, but gradients are not: {_listed(of_ranks)}"
    return (
        "after running the step again, all values are finite; check dropout, race conditions and "
        "faulty hardware"
    )


def _listed(texts: list[str]) -> str:
    return "; ".join(texts[:SHOWN]) + ("; ..." if len(texts) > SHOWN else "")


def _any(is_bad: Callable[[Tensor], bool], values: Any) -> bool:
    return any(
        is_bad(leaf)
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def _is_bad(tensor: Tensor) -> bool:
    """Of a DTensor: of what this rank has."""
    return not bool(torch.isfinite(local_tensor(tensor.detach())).all())


def _is_bad_input(tensor: Tensor) -> bool:
    """Masks among inputs may be -inf."""
    local = local_tensor(tensor.detach())
    return bool((local.isnan() | local.isposinf()).any())
