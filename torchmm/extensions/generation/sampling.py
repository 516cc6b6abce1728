"""Pictures and clips for words: what a trained model draws, outside of its run.

Words become a record of JSON data with a blank picture to be drawn behind them, which is read as
training reads its captions: the same context, and noise that depends on the seed and the request's
number alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from torchmm.common.errors import ConfigError, DataError
from torchmm.common.generated import GeneratorSpec
from torchmm.extensions.evaluation.drawings import draw_samples
from torchmm.extensions.evaluation.text.opened import Writer
from torchmm.extensions.evaluation.text.prompts import Request, read_steps

COLUMN = "drawn"
SIDE_PX = 8
"""Of the blank picture, which data scale to what the model draws."""


def draw_requests(
    writer: Writer,
    requests: Sequence[Request],
    *,
    steps: int,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> list[list[Image.Image]]:
    """Frames of what is drawn for each request; of a model of clips, as many as it can have.

    Args:
        steps: from noise to picture.
        seed: of the noise.
        max_prompt_tokens: longest request.

    Raises:
        ConfigError, DataError: the model cannot draw, or a request cannot be read.
    """
    spec = writer.model.generator_spec()
    if spec is None:
        raise ConfigError(
            "this model has no generator; use a run or checkpoint of a model with a generator"
        )
    found: dict[int, list[Image.Image]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        blank = _blank(folder, spec)
        asked = [_with_drawing(request, blank) for request in requests]
        read = read_steps(
            asked,
            writer.model,
            writer.tokenizer,
            max_prompt_tokens,
            folder,
            generate=COLUMN,
            seed=seed,
        )
        for batch in read:
            problems += batch.skipped
            for microbatch in (m for m in batch.microbatches if m.generator is not None):
                numbers = [s.index for s in microbatch.meta.samples for _ in s.generated]
                drawn = draw_samples(writer.pipeline, [microbatch], spec, writer.mesh, steps)
                found |= zip(numbers, (each.drawn for each in drawn), strict=True)
            if len(found) == len(requests):
                break
    if lost := [r.label for number, r in enumerate(requests) if number not in found]:
        why = "; ".join(problems) or f"longer than {max_prompt_tokens} tokens"
        raise DataError(f"{', '.join(lost)} cannot be used as prompts: {why}")
    return [found[number] for number in range(len(requests))]


def save_picture(frames: Sequence[Image.Image], stem: Path) -> Path:
    """A picture as STEM.png, a clip as STEM.gif."""
    if len(frames) == 1:
        file = stem.with_name(f"{stem.name}.png")
        frames[0].save(file)
        return file
    file = stem.with_name(f"{stem.name}.gif")
    frames[0].save(file, save_all=True, append_images=list(frames[1:]), duration=125, loop=0)
    return file


def _blank(folder: Path, spec: GeneratorSpec) -> str:
    """Name of a file with as many frames as are to be drawn."""
    levels = [255 * i // max(1, spec.frames - 1) for i in range(spec.frames)]  # equal ones are one
    frames = [Image.new("L", (SIDE_PX, SIDE_PX), level) for level in levels]
    return save_picture(frames, folder / "blank").name


def _with_drawing(request: Request, blank: str) -> Request:
    """Its words are a caption then, of what is to be drawn."""
    record = dict(request.record)
    words = record.pop("prompt", "")
    if not isinstance(words, str) or not words:
        raise ConfigError(
            f"{request.label}: image generation requires a text prompt; use --prompt TEXT"
        )
    record.pop("completion", None)
    return replace(request, record={**record, "text": words, COLUMN: blank})
