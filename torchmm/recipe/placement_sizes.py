"""Encoders with parallel sizes of their own on the LLM's ranks: sizes and value checks.

An encoder's pipeline has as many ranks as divide the LLM's, so blocks of consecutive pipeline ranks
hold one copy each. So do groups of the LLM's tensor-parallel ranks, where it is split over fewer.
What it does not use is data parallelism (Optimus §4.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from torchmm.common.errors import ConfigError
from torchmm.recipe.explain import NO_VALUE, Problem
from torchmm.recipe.model_section import GENERATOR
from torchmm.recipe.recipe import COLOCATED_SCHEDULES, MODULE_SIZES, ParallelConfig
from torchmm.recipe.sizes import Layout

Found = Iterator[Problem]


def encoder_layout(parallel: ParallelConfig, name: str, llm: Layout) -> Layout:
    """An encoder's own sizes.

    Where neither or one of `replicate` and `shard` is given, there are as many replicas as of the
    LLM, and shards are what is left.

    Args:
        name: of the encoder.
        llm: sizes of the LLM, whose ranks these are.

    Raises:
        ConfigError: the sizes do not divide the LLM's, or do not make its ranks.
    """
    found = _misfits(parallel, name, llm.pipeline, llm.tensor)
    if problems := [f"{p.key} = {p.value}: {p.text}" for p in found]:
        raise ConfigError(problems)
    given = parallel.sizes_given(name)
    pipeline, tensor = given.get("pipeline", 1), given.get("tensor", llm.tensor)
    ranks = prod(llm)
    left = ranks // (pipeline * tensor)
    replicate, shard = given.get("replicate", -1), given.get("shard", -1)
    if replicate == shard == -1:
        replicate = llm.replicate
    if shard == -1:
        shard = left // max(1, replicate)
    elif replicate == -1:
        replicate = left // max(1, shard)
    if replicate * shard != left:
        raise ConfigError(
            f"parallel.{name}: pipeline {pipeline} x replicate {replicate} x shard {shard} x "
            f"tensor {tensor} does not make the LLM's {ranks} ranks; remove replicate and shard, "
            "or set one of them to -1 (what is left)"
        )
    return Layout(pipeline, replicate, shard, tensor)


def check_colocated(parallel: ParallelConfig, encoders: list[str], llm: Layout | None) -> Found:
    """Everything about own sizes of encoders.

    Args:
        llm: sizes of the LLM; None: the number of ranks is not known.
    """
    placement, schedule = parallel.placement, parallel.schedule
    names = " or ".join(f'"{name}"' for name in COLOCATED_SCHEDULES)
    if schedule in COLOCATED_SCHEDULES and placement != "colocated":
        text = 'is for colocated encoders; set parallel.placement = "colocated"'
        yield Problem("parallel.schedule", schedule, text, ("parallel.placement",))
    yield from _check_tensor_bubbles(parallel, encoders)
    if placement != "colocated":
        return
    if schedule not in COLOCATED_SCHEDULES:
        text = f"needs a schedule that fills bubbles; set parallel.schedule = {names}"
        yield Problem("parallel.placement", placement, text, ("parallel.schedule",))
    if not encoders:
        text = 'but the model has no encoders; use "interleaved"'
        yield Problem("parallel.placement", placement, text, ("model",))
    for name in ("llm", GENERATOR):
        for size, value in parallel.sizes_given(name).items():
            text = (
                f"beside colocated encoders the {name}'s sizes are those of [parallel]; remove it"
            )
            yield Problem(f"parallel.{name}.{size}", value, text, (f"parallel.{size}",))
    yield from _unlike_tensors(parallel, encoders)
    for name in encoders:
        problems = list(_misfits(parallel, name, parallel.pipeline, parallel.tensor))
        yield from problems
        if llm is not None and not problems:
            try:
                encoder_layout(parallel, name, llm)
            except ConfigError as error:
                text = error.problems[0].partition(": ")[2]
                given = tuple(f"parallel.{name}.{size}" for size in MODULE_SIZES)
                yield Problem(f"parallel.{name}", NO_VALUE, text, given)


def check_encoder_layers(parallel: ParallelConfig, counts: Mapping[str, int | None]) -> Found:
    """Every stage of an encoder needs a layer.

    Args:
        counts: layers by encoder; None where they are not known.
    """
    for name, layers in counts.items():
        ranks, slices = parallel.sizes_given(name).get("pipeline", 1), parallel.slices(name) or 1
        if layers is not None and layers < ranks * slices:
            key, value = ("pipeline", ranks) if ranks > layers else ("segments", slices)
            text = (
                f"{name} has {layers} layers, fewer than {ranks} ranks of its own x {slices} "
                f"stages per rank = {ranks * slices}; use fewer ranks or stages"
            )
            yield Problem(f"parallel.{name}.{key}", value, text, (f"parallel.{name}", "model"))


def _misfits(parallel: ParallelConfig, name: str, pipeline: int, tensor: int) -> Found:
    """Own sizes that do not divide the LLM's."""
    given = parallel.sizes_given(name)
    own = given.get("pipeline", 1)
    if pipeline % own:
        divisors = ", ".join(str(n) for n in range(1, pipeline + 1) if pipeline % n == 0)
        text = (
            f"does not divide the {pipeline} pipeline ranks of the LLM, which the encoder's "
            f"pipelines share out; use one of {divisors}"
        )
        yield Problem(f"parallel.{name}.pipeline", own, text, ("parallel.pipeline",))
    own = given.get("tensor", tensor)
    if own < 1 or tensor % own:
        divisors = ", ".join(str(n) for n in range(1, tensor + 1) if tensor % n == 0)
        text = (
            f"does not divide the {tensor} tensor-parallel ranks of the LLM, which the encoder's "
            f"groups share out; use one of {divisors}"
        )
        yield Problem(f"parallel.{name}.tensor", own, text, ("parallel.tensor",))


def _check_tensor_bubbles(parallel: ParallelConfig, encoders: list[str]) -> Found:
    """Bubbles inside of the LLM's tensor-parallel layers are for encoders that have none."""
    key, share = "parallel.tensor_bubbles", parallel.tensor_bubbles
    if not share:
        return
    if parallel.placement != "colocated" or parallel.tensor == 1:
        text = 'has no use without placement = "colocated" and tensor > 1; remove it'
        yield Problem(key, share, text, ("parallel.placement", "parallel.tensor"))
        return
    for name in encoders:
        if parallel.sizes_given(name).get("tensor", parallel.tensor) != 1:
            text = f"puts {name} beside the LLM's communication; set parallel.{name}.tensor = 1"
            yield Problem(key, share, text, (f"parallel.{name}.tensor",))


def _unlike_tensors(parallel: ParallelConfig, encoders: list[str]) -> Found:
    """A rank of the plan is one tensor-parallel group, of all encoders."""
    sizes = {name: parallel.sizes_given(name).get("tensor", parallel.tensor) for name in encoders}
    name = min(sizes, key=lambda name: sizes[name], default="")
    for other, size in sizes.items():
        if size != sizes[name]:
            text = (
                f"differs from parallel.{name}.tensor = {sizes[name]}; give all encoders the same"
            )
            key = f"parallel.{other}.tensor"
            yield Problem(key, size, text, (f"parallel.{name}.tensor", "parallel.tensor"))
