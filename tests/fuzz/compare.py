"""Whether what ranks have seen is what the reference says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """How far apart equal numbers may be: relative, by what they are of."""

    loss: float
    gradient: float
    floor: float
    """Of a gradient, relative to the norm of all gradients."""
    update: float
    """Of weights, relative to how far training has moved them."""
    rounding: float
    """Of weights, relative to themselves."""
    sway: float
    """Of weights, relative to how far training has moved all of them."""
    drift: float = 1.0
    """How many times farther gradients may be apart that follow steps of training."""


BOUNDS = {
    "float32": Bounds(1e-5, 1e-5, 1e-6, 1e-4, 1e-6, 1e-5),
    "bfloat16": Bounds(2e-2, 2e-1, 2e-2, 4e-1, 1e-5, 4e-2),
}


def bounds_of(dtype: str, sharp: bool, narrow: bool = False, noisy: bool = False) -> Bounds:
    """For a model trained in `dtype`.

    Args:
        narrow: whether parameters or states rest in fewer bits, or matrices are made orthogonal:
            what differs by rounding then differs by a step of theirs, here and there. That equal
            gradients give equal bits is seen in tests/distributed/test_optimizer_layouts.py.
        noisy: whether matrices are made orthogonal in bfloat16: all directions of a gradient become
            equally large, and some have nothing but the noise of rounding, which differs between
            equal layouts. Where weights go is not judged then; losses, norms and the first step's
            gradients are.
        sharp: see `fuzz.models.is_sharp`; in float32 the reference itself is then off by more
            than 2e-5, against float64.
    """
    found, factor = BOUNDS[dtype], 10 if sharp else 1
    if narrow:
        update, sway = max(found.update, 0.05), max(found.sway, 0.02)
        found = replace(found, loss=max(found.loss, 1e-4), update=update, sway=sway, drift=100.0)
    if noisy:
        found = replace(found, update=2.0)
    if narrow and dtype == "bfloat16":
        found = replace(found, rounding=2**-7)
    return replace(
        found,
        gradient=factor * found.gradient,
        floor=factor * found.floor,
        update=factor * found.update,
        sway=factor * found.sway,
    )


def differences(
    ranks: list[dict[str, Any]],
    wanted: dict[str, Any],
    first: int,
    bounds: Bounds,
) -> Iterator[str]:
    """What differs, in words; nothing if all is equal.

    Args:
        ranks: what each rank saved.
        wanted: what the reference saved.
        first: number of steps done before.
    """
    steps = wanted["steps"][first : first + len(ranks[0]["losses"])]
    begin = wanted["initial"] if first == 0 else wanted["steps"][first - 1]["weights"]
    met: set[str] = set()
    for rank, seen in enumerate(ranks):
        if len(seen["losses"]) != len(steps):
            yield f"rank {rank}: {len(seen['losses'])} steps, not {len(steps)}"
            continue
        for number, step in enumerate(steps):
            pairs = seen["losses"][number], seen["norms"][number]
            yield from _numbers(rank, *pairs, first + number, step, bounds)
        looser = replace(bounds, gradient=bounds.gradient * (bounds.drift if first else 1.0))
        yield from _gradients(rank, seen, steps[0]["gradients"], looser)
        copies = seen["copies"]
        yield from _weights(rank, seen["weights"], copies, steps[-1]["weights"], begin, bounds)
        if averages := steps[-1]["averages"]:
            found = _weights(rank, seen["averages"], copies, averages, begin, bounds)
            yield from (f"average: {what}" for what in found)
            trained = {n for n in seen["weights"] if copies.get(n, n) in averages}
            lost = sorted(trained - seen["averages"].keys())
            yield from (f"average: rank {rank}: {name} is not there" for name in lost)
        met |= seen["weights"].keys()
    if missing := sorted(wanted["initial"].keys() - met):
        yield f"no rank has {missing[0]} (and {len(missing) - 1} more)"


def _numbers(
    rank: int, loss: float, norm: float, number: int, step: dict[str, Any], bounds: Bounds
) -> Iterator[str]:
    pairs = (
        ("loss", loss, step["loss"], bounds.loss),
        ("grad_norm", norm, step["norm"], bounds.gradient),
    )
    for name, found, expected, bound in pairs:
        if not abs(found - expected) <= bound * max(abs(expected), 1e-3):
            yield f"step {number} rank {rank}: {name} {found:.7g}, not {expected:.7g}"


def _gradients(
    rank: int, seen: dict[str, Any], expected: dict[str, Tensor], bounds: Bounds
) -> Iterator[str]:
    found = seen["gradients"]
    every = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    for name, gradient in found.items():
        original = seen["copies"].get(name, name)
        if original not in expected:
            yield f"rank {rank}: {name} has a gradient but is frozen"
            continue
        error = _distance(gradient, expected[original])
        norm = float(expected[original].norm())
        if not error <= bounds.gradient * norm + bounds.floor * every:
            relative = error / max(norm, 1e-30)
            yield f"rank {rank}: gradient of {name} is off by {relative:.2g}"
    for name in seen["weights"]:
        if seen["copies"].get(name, name) in expected and name not in found:
            yield f"rank {rank}: {name} has no gradient"


def _weights(
    rank: int,
    seen: dict[str, Tensor],
    copies: dict[str, str],
    expected: dict[str, Tensor],
    begin: dict[str, Tensor],
    bounds: Bounds,
) -> Iterator[str]:
    moves = {name: _distance(value, begin[name]) for name, value in expected.items()}
    every = sum(move**2 for move in moves.values()) ** 0.5
    for name, value in seen.items():
        original = copies.get(name, name)
        error, moved = _distance(value, expected[original]), moves[original]
        floor = bounds.rounding * float(expected[original].norm()) + bounds.sway * every
        if not error <= bounds.update * moved + floor:
            relative = error / max(moved, 1e-30)
            yield f"rank {rank}: {name} is off by {relative:.2g} of how far it has moved"


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).norm())
