"""Comparison of the results of ranks with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """Relative tolerances."""

    loss: float
    gradient: float
    floor: float
    """Tolerance of a gradient, relative to the norm of all gradients."""
    update: float
    """Tolerance of weights, relative to their change during training."""
    rounding: float
    """Tolerance of weights, relative to their norm."""
    total_update: float
    """Tolerance of weights, relative to the change of all weights during training."""
    drift: float = 1.0
    """Factor of the tolerance of gradients and their norm after previous training steps."""

    def after(self, steps: int) -> Bounds:
        """Return the tolerances of a step after a number of training steps."""
        return replace(self, gradient=self.gradient * (self.drift if steps else 1.0))


BOUNDS = {
    # AdamW magnifies rounding: after two steps, even single processes differ by up to 3.4e-5.
    "float32": Bounds(1e-5, 1e-5, 1e-6, 1e-4, 1e-6, 1e-5, drift=4.0),
    "bfloat16": Bounds(2e-2, 2e-1, 2e-2, 4e-1, 1e-5, 4e-2),
}


def bounds_of(dtype: str, sharp: bool, low_precision: bool = False, noisy: bool = False) -> Bounds:
    """Return the tolerances for a model that is trained in `dtype`.

    Args:
        dtype: Dtype of the computation.
        sharp: See `fuzz.models.is_sharp`. The float32 reference then differs from float64 by more
            than 2e-5.
        low_precision: Whether parameters or optimizer states have fewer bits, or matrices are
            orthogonalized. Differences by rounding then become differences by a quantization step.
            tests/distributed/test_optimizer_layouts.py shows that equal gradients give equal bits.
        noisy: Whether matrices are orthogonalized in bfloat16. All directions of a gradient become
            equally large, and some consist of rounding noise, which differs between equal layouts.
            Weights are not compared then, in contrast to losses, norms and the first gradients.
    """
    bounds, factor = BOUNDS[dtype], 10 if sharp else 1
    if low_precision:
        update, total_update = max(bounds.update, 0.05), max(bounds.total_update, 0.02)
        bounds = replace(
            bounds,
            loss=max(bounds.loss, 1e-4),
            update=update,
            total_update=total_update,
            drift=100.0,
        )
    if noisy:
        bounds = replace(bounds, update=2.0)
    if low_precision and dtype == "bfloat16":
        bounds = replace(bounds, rounding=2**-7)
    return replace(
        bounds,
        gradient=factor * bounds.gradient,
        floor=factor * bounds.floor,
        update=factor * bounds.update,
        total_update=factor * bounds.total_update,
    )


def differences(
    ranks: list[dict[str, Any]],
    expected: dict[str, Any],
    first: int,
    bounds: Bounds,
) -> Iterator[str]:
    """Yield descriptions of all differences.

    Args:
        ranks: Results that each rank saved.
        expected: Results that the reference saved.
        first: Number of previous steps.
    """
    steps = expected["steps"][first : first + len(ranks[0]["losses"])]
    begin = expected["initial"] if first == 0 else expected["steps"][first - 1]["weights"]
    all_names: set[str] = set()
    for rank, result in enumerate(ranks):
        if len(result["losses"]) != len(steps):
            yield f"rank {rank}: {len(result['losses'])} steps, not {len(steps)}"
            continue
        for number, step in enumerate(steps):
            pairs = result["losses"][number], result["norms"][number]
            yield from _numbers(rank, *pairs, first + number, step, bounds.after(first + number))
        yield from _gradients(rank, result, steps[0]["gradients"], bounds.after(first))
        copies = result["copies"]
        yield from _weights(rank, result["weights"], copies, steps[-1]["weights"], begin, bounds)
        if averages := steps[-1]["averages"]:
            problems = _weights(rank, result["averages"], copies, averages, begin, bounds)
            yield from (f"average: {problem}" for problem in problems)
            trained = {n for n in result["weights"] if copies.get(n, n) in averages}
            missing_averages = sorted(trained - result["averages"].keys())
            yield from (f"average: rank {rank}: {name} is missing" for name in missing_averages)
        all_names |= result["weights"].keys()
    if missing := sorted(expected["initial"].keys() - all_names):
        yield f"no rank has {missing[0]} (and {len(missing) - 1} more)"


def _numbers(
    rank: int, loss: float, norm: float, number: int, step: dict[str, Any], bounds: Bounds
) -> Iterator[str]:
    pairs = (
        ("loss", loss, step["loss"], bounds.loss),
        ("grad_norm", norm, step["norm"], bounds.gradient),
    )
    for name, actual, expected, bound in pairs:
        if not abs(actual - expected) <= bound * max(abs(expected), 1e-3):
            yield f"step {number} rank {rank}: {name} {actual:.7g}, not {expected:.7g}"


def _gradients(
    rank: int, result: dict[str, Any], expected: dict[str, Tensor], bounds: Bounds
) -> Iterator[str]:
    gradients = result["gradients"]
    total_norm = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    for name, gradient in gradients.items():
        original = result["copies"].get(name, name)
        if original not in expected:
            yield f"rank {rank}: {name} has a gradient but is frozen"
            continue
        error = _distance(gradient, expected[original])
        norm = float(expected[original].norm())
        if not error <= bounds.gradient * norm + bounds.floor * total_norm:
            relative = error / max(norm, 1e-30)
            yield f"rank {rank}: gradient of {name} is off by {relative:.2g}"
    for name in result["weights"]:
        if result["copies"].get(name, name) in expected and name not in gradients:
            yield f"rank {rank}: {name} has no gradient"


def _weights(
    rank: int,
    actual: dict[str, Tensor],
    copies: dict[str, str],
    expected: dict[str, Tensor],
    begin: dict[str, Tensor],
    bounds: Bounds,
) -> Iterator[str]:
    moves = {name: _distance(value, begin[name]) for name, value in expected.items()}
    total_move = sum(move**2 for move in moves.values()) ** 0.5
    for name, value in actual.items():
        original = copies.get(name, name)
        error, moved = _distance(value, expected[original]), moves[original]
        floor = (
            bounds.rounding * float(expected[original].norm()) + bounds.total_update * total_move
        )
        if not error <= bounds.update * moved + floor:
            relative = error / max(moved, 1e-30)
            yield f"rank {rank}: {name} is off by {relative:.2g} of its change"


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).norm())
