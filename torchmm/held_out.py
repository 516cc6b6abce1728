"""What a run does with its held-out samples: losses, text and drawings, into its records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice

from torchmm.batch import StepBatch
from torchmm.build import RunParts, build_data
from torchmm.config_model import GENERATOR
from torchmm.drawings import draw_samples, held_out_drawings
from torchmm.evaluate import (
    GeneratedText,
    generate_samples,
    held_out_losses,
    held_out_prompts,
    word_error_rate,
)
from torchmm.files import replace_atomically
from torchmm.metrics import StepRecord
from torchmm.report import draw_captions, draw_pictures


class HeldOut:
    """Validation of one run.

    Args:
        run: its parts.
        loss_weights: factors of the losses, by module, where there are several.
    """

    def __init__(self, run: RunParts, loss_weights: Mapping[str, float]) -> None:
        self._run = run
        self._loss_weights = loss_weights
        self._batches: list[StepBatch] | None = None

    def validate(self, step: int, record: StepRecord) -> StepRecord:
        """Held-out losses after `step` into the record; text into samples.json, drawings into
        drawings/. All ranks must call it."""
        run, config = self._run, self._run.recipe.validation
        run.model.eval()
        if self._batches is None:
            loader = build_data(run.recipe, run.model, run.tokenizer, run.mesh, validation=True)
            self._batches = list(islice(loader, config.batches))
        losses = held_out_losses(run.pipeline, self._batches, run.mesh)
        if config.samples:
            texts = self._generate(step)
            if any(text.duration_ms for text in texts):
                record = replace(record, word_error_rate=word_error_rate(texts))
        if config.drawings:
            self._draw(step)
        run.model.train()
        if run.model.generator is None:
            return replace(record, validation_loss=losses["llm"])
        return replace(
            record,
            validation_loss=sum(self._loss_weights[name] * losses[name] for name in losses),
            validation_loss_text=losses["llm"],
            validation_loss_image=losses[GENERATOR],
        )

    def _draw(self, step: int) -> None:
        """Drawings for held-out texts into a picture of this step."""
        run, config = self._run, self._run.recipe.validation
        loader = build_data(
            run.recipe, run.model, run.tokenizer, run.mesh, validation=True, for_prompts=True
        )
        spec = run.model.generator_spec()
        assert spec is not None
        prompts = held_out_drawings(loader, config.drawings)
        drawn = draw_samples(run.pipeline, prompts, spec, run.mesh, config.denoising_steps)
        if run.mesh.rank == 0 and drawn:
            directory = run.run_dir / "drawings"
            directory.mkdir(exist_ok=True)
            title = f"drawn after step {step} (and the held-out images themselves)"
            shown = [(d.truth, d.drawn, d.text(run.tokenizer)) for d in drawn]
            draw_pictures(shown, title, directory / f"step-{step}.png")

    def _generate(self, step: int) -> list[GeneratedText]:
        """Text for held-out images and sounds into samples.json and captions.png."""
        run, config = self._run, self._run.recipe.validation
        loader = build_data(
            run.recipe, run.model, run.tokenizer, run.mesh, validation=True, for_prompts=True
        )
        prompts = held_out_prompts(loader, config.samples)
        texts = generate_samples(
            run.pipeline, prompts, run.tokenizer, run.mesh, config.max_new_tokens
        )
        if run.mesh.rank > 0 or not texts:
            return texts
        self._append_samples(step, [{"step": step, **asdict(t)} for t in texts])
        shown = [
            (image, text.generated, text.truth)
            for text in texts
            for image in loader.images(text.source, text.index)[:1]
        ]
        if shown:
            title = f"held-out images after step {step}"
            draw_captions(shown, title, run.run_dir / "captions.png")
        return texts

    def _append_samples(self, step: int, samples: list[dict]) -> None:
        file = self._run.run_dir / "samples.json"
        earlier = json.loads(file.read_text()) if file.exists() else []
        kept = [s for s in earlier if s["step"] < step]
        text = json.dumps(kept + samples, indent=1, ensure_ascii=False)
        replace_atomically(file, text.encode())
