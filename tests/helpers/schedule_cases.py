"""Layouts with suitable schedules: one or several stages per rank, chains and other graphs."""

from torchmm.pipelining.plan.graph import StageLayout, StageSpec
from torchmm.pipelining.schedules.classic import gpipe, interleaved_1f1b, one_f_one_b
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout


def chain(ranks, per_rank=1, frozen=()):
    count = ranks * per_rank
    stages = tuple(
        StageSpec(i, "llm", i, i + 1, (i % ranks,), i // ranks, trainable=i not in frozen)
        for i in range(count)
    )
    return StageLayout(stages, tuple((i, i + 1) for i in range(count - 1)))


def two_encoders():
    """Return a layout with vision on rank 0, audio on rank 1, and the LLM on ranks 2 and 3."""
    names = ("vision", "audio", "llm", "llm")
    stages = tuple(StageSpec(i, name, i // 3, i // 3 + 1, (i,)) for i, name in enumerate(names))
    return StageLayout(stages, ((0, 2), (1, 2), (2, 3)))


def encoder_on_the_first_rank():
    vision = ModuleLayers("vision", "encoder", (1.0,) * 3)
    return megatron_layout([vision, ModuleLayers("llm", "llm", (2.0,) * 6)], ranks=3)


LAYOUTS = {
    "one rank": (chain(1), one_f_one_b),
    "two ranks": (chain(2), one_f_one_b),
    "five ranks": (chain(5), one_f_one_b),
    "two per rank": (chain(4, 2), interleaved_1f1b),
    "three per rank": (chain(3, 3), interleaved_1f1b),
    "frozen start": (chain(4, frozen=(0, 1)), one_f_one_b),
    "two encoders": (two_encoders(), one_f_one_b),
    "encoder beside the LLM": (encoder_on_the_first_rank(), one_f_one_b),
    "gpipe": (two_encoders(), gpipe),
}
