"""Validation during training: held-out losses, generated text, generated images."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import islice

from torchmm.common.files import replace_atomically
from torchmm.common.module_names import GENERATOR
from torchmm.data.loader import Loader, StepBatch
from torchmm.extensions.evaluation.scores import score
from torchmm.extensions.reports.page.contents import SAMPLES_FILE, SAMPLES_FOLDER
from torchmm.training.data_build import build_data
from torchmm.training.hooks.hook import Hook, StepDone, Training
from torchmm.training.parts import RunParts
from torchmm.training.report import keep_thumbnail, plot_captions, plot_pictures
from torchmm.training.step import gather_corrupt_samples, loss_weights
from torchmm.training.tracking.figures import StepRecord
from torchmm.training.validation import (
    GeneratedText,
    draw_samples,
    generate_samples,
    held_out_drawings,
    held_out_losses,
    held_out_prompts,
    scored_sources,
    source_scores,
    with_references,
)


class ValidationHook(Hook):
    """Validates the model every `validation.interval` steps and adds the losses to the record.

    Generated text is written to samples.json and captions.png, generated images to drawings/.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._config = self.recipe.validation
        self._loss_weights = loss_weights(self.recipe.model.generator)
        self._batches: list[StepBatch] | None = None
        """Batches of every validation, loaded by the first one."""

    def after_step(self, done: StepDone) -> None:
        """Validate the model if it is due."""
        step = done.record.step
        if self.parts.held_out is None or not self.is_due(step, self._config.interval):
            return
        with self.training.health.phase(step, "validation"), validated_weights(self.parts):
            done.record = self._validate(step, done.record)

    def _validate(self, step: int, record: StepRecord) -> StepRecord:
        """Return the record with losses and scores of the held-out samples; collective."""
        parts = self.parts
        parts.model.eval()
        if self._batches is None:
            self._batches = self._load_batches()
        losses = held_out_losses(parts.pipeline, self._batches, parts.mesh)
        if self._config.samples:
            texts = self._generate_texts(step)
            scores = source_scores(texts, self.recipe.data.validation)
            record = replace(record, scores=scores or None)
            if any(text.duration_ms for text in texts):
                rate = score("word_error_rate", [text.answer for text in texts])
                record = replace(record, word_error_rate=rate)
        if self._config.drawings:
            self._generate_images(step)
        parts.model.train()
        if parts.model.generator is None:
            return replace(record, validation_loss=losses["llm"])
        return replace(
            record,
            validation_loss=sum(self._loss_weights[name] * losses[name] for name in losses),
            validation_loss_text=losses["llm"],
            validation_loss_image=losses[GENERATOR],
        )

    def _load_batches(self) -> list[StepBatch]:
        """Return the batches of every validation, decoded as training batches are; collective."""
        parts = self.parts
        loader = self._loader()
        read = islice(loader.batches(), self._config.batches)
        batches = [batch for batch in read if batch is not None]
        corrupt = {name: why for batch in batches for name, why in batch.corrupt.items()}
        corrupt = gather_corrupt_samples(corrupt, parts.mesh)
        return [loader.settle(batch, corrupt) for batch in batches]

    def _loader(self, *, for_prompts: bool = False) -> Loader:
        """Return a loader that starts at the first held-out sample.

        Args:
            for_prompts: Whether all ranks load and decode the same samples.
        """
        parts = self.parts
        return build_data(
            parts.run,
            parts.model,
            parts.tokenizer,
            parts.mesh,
            validation=True,
            for_prompts=for_prompts,
            samples=parts.held_out,
            reads=None if for_prompts else parts.pipeline.reads,
        )

    def _generate_images(self, step: int) -> None:
        """Generate images for held-out texts and plot them next to the reference images."""
        parts = self.parts
        spec = parts.model.generator_spec()
        assert spec is not None
        prompts = held_out_drawings(self._loader(for_prompts=True), self._config.drawings)
        steps = self._config.denoising_steps
        drawn = draw_samples(parts.pipeline, prompts, spec, parts.mesh, steps)
        if parts.mesh.rank == 0 and drawn:
            directory = parts.run_dir / "drawings"
            directory.mkdir(exist_ok=True)
            title = f"drawn after step {step} (and the held-out images themselves)"
            shown = [(d.truth, d.drawn, d.text(parts.tokenizer)) for d in drawn]
            plot_pictures(shown, title, directory / f"step-{step}.png")

    def _generate_texts(self, step: int) -> list[GeneratedText]:
        """Return text generated for held-out samples; rank 0 writes samples.json, captions.png."""
        parts = self.parts
        loader = self._loader(for_prompts=True)
        held_out = self.recipe.data.validation
        prompts = held_out_prompts(loader, self._config.samples, scored_sources(held_out))
        training = self.recipe.training
        texts = generate_samples(
            parts.pipeline,
            prompts,
            parts.tokenizer,
            parts.mesh,
            self._config.max_new_tokens,
            row_tokens=training.sequence_length * training.microbatch_size,
        )
        texts = with_references(texts, loader)
        if parts.mesh.rank > 0 or not texts:
            return texts
        pictures = [loader.images(text.source, text.index)[:1] for text in texts]
        names = [
            keep_thumbnail(parts.run_dir / SAMPLES_FOLDER, t.source, t.index, *images)
            for t, images in zip(texts, pictures, strict=True)
        ]
        self._append_samples(
            step,
            [
                {"step": step, **asdict(text), "picture": name}
                for text, name in zip(texts, names, strict=True)
            ],
        )
        shown = [
            (image, text.generated, text.truth)
            for text, images in zip(texts, pictures, strict=True)
            for image in images
        ]
        if shown:
            title = f"held-out images after step {step}"
            plot_captions(shown, title, parts.run_dir / "captions.png")
        return texts

    def _append_samples(self, step: int, samples: list[dict]) -> None:
        """Add samples to samples.json and remove samples of this and later steps."""
        file = self.parts.run_dir / SAMPLES_FILE
        earlier = json.loads(file.read_text()) if file.exists() else []
        kept = [s for s in earlier if s["step"] < step]
        text = json.dumps(kept + samples, indent=1, ensure_ascii=False)
        replace_atomically(file, text.encode())


def validated_weights(parts: RunParts) -> AbstractContextManager[None]:
    """Return a context in which the model has the weights to validate (`validation.ema`)."""
    if parts.average is None or not parts.run.recipe.validation.ema:
        return nullcontext()
    return parts.average.in_place()
