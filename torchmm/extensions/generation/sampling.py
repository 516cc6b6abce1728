"""Generate images and videos for text, with a trained model outside its run.

The text becomes a record of JSON data, followed by a blank image to generate. The record is read
like captions in training. The context is therefore the same, and the noise depends only on the seed
and the number of the request.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from torchmm.common.errors import ConfigError, DataError
from torchmm.common.generated import GeneratorSpec
from torchmm.extensions.evaluation.generated_images import generate_sample_images
from torchmm.extensions.evaluation.text.load_model import TextGenerator
from torchmm.extensions.evaluation.text.prompts import Request, read_steps

COLUMN = "drawn"
SIDE_PX = 8
"""Side of the blank image in pixels. The data pipeline scales it to the generator."""


def generate_requested_images(
    writer: TextGenerator,
    requests: Sequence[Request],
    *,
    steps: int,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
) -> list[list[Image.Image]]:
    """Return the generated frames of each request, for videos the maximum number of frames.

    Args:
        writer: Model.
        requests: Requests with the text.
        steps: Number of denoising steps.
        seed: Seed of the noise.
        max_prompt_tokens: Maximum length of a prompt.

    Raises:
        ConfigError, DataError: The model has no generator, or a request cannot be read.
    """
    spec = writer.model.generator_spec()
    if spec is None:
        raise ConfigError(
            "this model has no generator; use a run or checkpoint of a model with a generator"
        )
    frames_by_request: dict[int, list[Image.Image]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        blank = _write_blank_image(folder, spec)
        asked = [_with_target_image(request, blank) for request in requests]
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
                generated = generate_sample_images(
                    writer.pipeline, [microbatch], spec, writer.mesh, steps
                )
                frames_by_request |= zip(
                    numbers, (image.images for image in generated), strict=True
                )
            if len(frames_by_request) == len(requests):
                break
    if lost := [r.label for number, r in enumerate(requests) if number not in frames_by_request]:
        why = "; ".join(problems) or f"longer than {max_prompt_tokens} tokens"
        raise DataError(f"{', '.join(lost)} cannot be used as prompts: {why}")
    return [frames_by_request[number] for number in range(len(requests))]


def save_image(frames: Sequence[Image.Image], stem: Path) -> Path:
    """Write an image to STEM.png or a video to STEM.gif, and return the path."""
    if len(frames) == 1:
        file = stem.with_name(f"{stem.name}.png")
        frames[0].save(file)
        return file
    file = stem.with_name(f"{stem.name}.gif")
    frames[0].save(file, save_all=True, append_images=list(frames[1:]), duration=125, loop=0)
    return file


def _write_blank_image(folder: Path, spec: GeneratorSpec) -> str:
    """Write a blank file with the number of frames to generate, and return its name."""
    levels = [255 * i // max(1, spec.frames - 1) for i in range(spec.frames)]  # equal ones are one
    frames = [Image.new("L", (SIDE_PX, SIDE_PX), level) for level in levels]
    return save_image(frames, folder / "blank").name


def _with_target_image(request: Request, blank: str) -> Request:
    """Return the request with its text as the caption of the blank image."""
    record = dict(request.record)
    text = record.pop("prompt", "")
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"{request.label}: image generation requires a text prompt; use --prompt TEXT"
        )
    record.pop("completion", None)
    return replace(request, record={**record, "text": text, COLUMN: blank})
