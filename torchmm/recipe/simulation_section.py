"""The recipe's section about a simulated step: a cluster, and statistics instead of data.

Part of the schema in `torchmm.recipe.recipe`, which imports everything.
`torchmm.balance.simulation.workload` draws microbatches from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import Field

from torchmm.recipe.section import Section

Range = list[int]
"""Least and most; any whole number between them is equally likely."""


class SimulatedImages(Section):
    """Size of the images one encoder reads; NAME is the encoder's."""

    patches: int = Field(ge=1)
    """Patches the encoder processes per image."""
    tokens: int = Field(ge=0)
    """Tokens an image takes in the LLM's sequence."""


class SimulatedGeneration(Section):
    """Size of the images or clips that the generator draws."""

    rows: int = Field(ge=1)
    """Rows of patches of one frame."""
    columns: int = Field(ge=1)
    """Columns of patches of one frame."""
    frames: Range = Field(default=[1, 1])
    """Frames (as the generator sees them) of a clip: least and most; 1 is an image."""
    frames_per_sequence: int | None = Field(default=None, ge=1)
    """Most frames of all clips of a sequence together; default: no limit."""
    context_tokens: int = Field(default=128, ge=1)
    """Most tokens of the LLM that an image or clip is drawn from."""


class SimulatedSequences(Section):
    """One kind of packed sequences; a mixture has several [[simulation.sequences]] tables."""

    weight: float = Field(default=1.0, gt=0)
    """Share of sequences of this kind, relative to the other kinds' weights."""
    samples: int = Field(default=1, ge=1)
    """Samples of about equal length in a sequence; attention stays within each of them."""
    encoder: str | None = None
    """Encoder that reads the images; default: the only one in [simulation.images]."""
    images: Range = Field(default=[0, 0])
    """Images to be read per sequence: least and most."""
    generated: Range = Field(default=[0, 0])
    """Images or clips to be drawn per sequence: least and most."""
    tokens: Range | None = None
    """Tokens per sequence, images included: least and most; default: all of
    `training.sequence_length`. What images leave is text."""


class SimulationConfig(Section):
    """A step that is simulated, not run (`scripts/simulate.py`): on which devices, with which data.

    A recipe that only describes statistics of its data needs no [data] and no tokenizer.
    """

    device: str = "h100"
    """Device of the table in `torchmm/balance/costs/devices.py`."""
    trials: str = ""
    """File of trial runs of the modules (`scripts/profile_modules.py`), whose times orchestration
    uses instead of the cost model's; "": none."""
    gpus: int = Field(default=1, ge=1)
    """Number of devices; pipeline x replicate x shard x tensor."""
    seed: int = Field(default=0, ge=0)
    """Seed of the microbatches."""
    images: dict[str, SimulatedImages] = Field(default={})
    """Size of images by encoder."""
    generated: SimulatedGeneration | None = None
    """Size of what the generator draws."""
    sequences: list[SimulatedSequences] = Field(default=[])
    """Mixture of packed sequences; none: `training.sequence_length` tokens of text."""


class Contradiction(NamedTuple):
    """Values of the section that do not fit each other."""

    key: str
    value: Any
    text: str
    """What is wrong, and a remedy."""


def encoder_of(config: SimulationConfig, kind: SimulatedSequences) -> str | None:
    """Encoder that reads the images of a kind of sequences; None if that is not clear."""
    return kind.encoder or (next(iter(config.images)) if len(config.images) == 1 else None)


def contradictions(config: SimulationConfig, sequence_length: int) -> Iterator[Contradiction]:
    """What keeps sequences of `sequence_length` tokens from being drawn; keys as in a recipe."""
    if config.generated is not None:
        wrong = list(_wrong({"simulation.generated.frames": config.generated.frames}, least=1))
        yield from wrong
        if wrong:
            return
    for index, kind in enumerate(config.sequences):
        key = f"simulation.sequences[{index}]"
        ranges = {
            f"{key}.images": kind.images,
            f"{key}.generated": kind.generated,
            f"{key}.tokens": kind.tokens or [1, 1],
        }
        wrong = list(_wrong(ranges))
        yield from wrong
        if not wrong:
            yield from _in_sequence(config, kind, key, sequence_length)


def _wrong(ranges: dict[str, Range], least: int = 0) -> Iterator[Contradiction]:
    for key, numbers in ranges.items():
        if len(numbers) != 2 or not least <= numbers[0] <= numbers[1]:
            text = f"must be two numbers, least and most, from {least} on"
            yield Contradiction(key, numbers, text)


def _in_sequence(
    config: SimulationConfig, kind: SimulatedSequences, key: str, sequence_length: int
) -> Iterator[Contradiction]:
    encoder = encoder_of(config, kind)
    size = config.images.get(encoder) if encoder else None
    shortest, longest = kind.tokens or [sequence_length, sequence_length]
    if kind.images[1] and size is None:
        text = f"are of unknown size; add [simulation.images.{encoder or 'NAME'}]"
        if encoder is None and config.images:
            text = f"whose? set encoder to one of {', '.join(config.images)}"
        yield Contradiction(f"{key}.images", kind.images, text)
    elif size is not None and kind.images[1] * size.tokens > shortest:
        needed = kind.images[1] * size.tokens
        text = f"take up to {needed} tokens, more than the {shortest} of a sequence; lower them"
        yield Contradiction(f"{key}.images", kind.images, text)
    if longest > sequence_length or shortest < kind.samples:
        text = f"must be between samples = {kind.samples} and sequence_length = {sequence_length}"
        yield Contradiction(f"{key}.tokens", [shortest, longest], text)
    drawn = config.generated
    if drawn is None:
        if kind.generated[1]:
            text = "are of unknown size; add [simulation.generated]"
            yield Contradiction(f"{key}.generated", kind.generated, text)
        return
    frames = kind.generated[1] * drawn.frames[0]
    most = drawn.frames_per_sequence
    if most is not None and frames > most:
        text = f"have at least {frames} frames, but frames_per_sequence = {most}; lower or raise it"
        yield Contradiction(f"{key}.generated", kind.generated, text)
