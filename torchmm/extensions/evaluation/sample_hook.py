"""Generate text and images for held-out samples during training."""

from __future__ import annotations

import json
from dataclasses import asdict

from torchmm.common.files import replace_atomically
from torchmm.data.loader import Loader
from torchmm.extensions.evaluation.generated_images import (
    generate_sample_images,
    held_out_target_images,
)
from torchmm.extensions.evaluation.sample_plots import (
    plot_captions,
    plot_generated_images,
    write_thumbnail,
)
from torchmm.extensions.evaluation.samples import (
    GeneratedText,
    generated_text,
    held_out_prompts,
    source_scores,
)
from torchmm.extensions.evaluation.scores import score
from torchmm.extensions.evaluation.text.generate import generate_texts
from torchmm.extensions.evaluation.text.prompts import batch_prompts
from torchmm.extensions.evaluation.text.sampling import Sampling
from torchmm.training.data_build import build_data
from torchmm.training.hooks.hook import FinishedStep, Hook, TrainingContext
from torchmm.training.hooks.validation import validated_weights
from torchmm.training.tracking.run_directory import (
    GENERATED_IMAGES_FOLDER,
    SAMPLES_FILE,
    SAMPLES_FOLDER,
)

MAX_BATCH_PROMPTS = 16
"""Maximum number of held-out samples whose text is generated in one batch."""


class SampleHook(Hook):
    """Hook that generates text and images for held-out samples every `validation.interval` steps.

    Text is written to samples.json and captions.png, and its scores are added to the record. Images
    are written to generated_images/.
    """

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._config = self.recipe.validation

    def after_step(self, done: FinishedStep) -> None:
        """Generate text and images if they are due."""
        step = done.step
        if self.components.held_out is None or not self.is_due(step, self._config.interval):
            return
        with self.training.health.phase(step, "validation"), validated_weights(self.components):
            self.components.model.eval()
            if self._config.num_samples:
                texts = self._generate_texts(step)
                scores = source_scores(texts, self.recipe.data.validation)
                done.record["scores"] = scores or None
                if any(text.duration_ms for text in texts):
                    answers = [text.answer for text in texts]
                    done.record["word_error_rate"] = score("word_error_rate", answers)
            if self._config.generated_images:
                self._generate_images(step)
            self.components.model.train()

    def _loader(self) -> Loader:
        """Return a loader of held-out samples. All ranks load and decode the same samples."""
        components = self.components
        return build_data(
            components.run,
            components.model,
            components.tokenizer,
            components.mesh,
            validation=True,
            for_prompts=True,
            samples=components.held_out,
        )

    def _generate_images(self, step: int) -> None:
        """Generate images for held-out text and plot them next to the reference images."""
        components = self.components
        spec = components.model.generator_spec()
        assert spec is not None
        prompts = held_out_target_images(self._loader(), self._config.generated_images)
        steps = self._config.denoising_steps
        generated = generate_sample_images(
            components.pipeline, prompts, spec, components.mesh, steps
        )
        if components.mesh.rank == 0 and generated:
            directory = components.run_dir / GENERATED_IMAGES_FOLDER
            directory.mkdir(exist_ok=True)
            title = f"generated after step {step} (with the validation images)"
            shown = [(d.truth, d.images, d.text(components.tokenizer)) for d in generated]
            plot_generated_images(shown, title, directory / f"step-{step}.png")

    def _generate_texts(self, step: int) -> list[GeneratedText]:
        """Return text generated for held-out samples, and write samples.json and captions.png."""
        components = self.components
        loader = self._loader()
        training = self.recipe.training
        prompts = held_out_prompts(loader, self._config.num_samples, self.recipe.data.validation)
        max_tokens = training.sequence_length * training.microbatch_size
        batches = batch_prompts(prompts, MAX_BATCH_PROMPTS, max_tokens)
        sampling = Sampling(self._config.max_new_tokens)
        written = [
            *generate_texts(
                components.pipeline, batches, components.tokenizer, components.mesh, sampling
            )
        ]
        texts = [generated_text(*pair, components.tokenizer, loader) for pair in written]
        if components.mesh.rank > 0 or not texts:
            return texts
        sample_images = [loader.images(text.source, text.index)[:1] for text in texts]
        names = [
            write_thumbnail(components.run_dir / SAMPLES_FOLDER, t.source, t.index, *images)
            for t, images in zip(texts, sample_images, strict=True)
        ]
        # After a resume, the file may have samples of this and later steps.
        file = components.run_dir / SAMPLES_FILE
        earlier = json.loads(file.read_text()) if file.exists() else []
        samples = [sample for sample in earlier if sample["step"] < step]
        samples += [
            {"step": step, **asdict(text), "picture": name}
            for text, name in zip(texts, names, strict=True)
        ]
        content = json.dumps(samples, indent=1, ensure_ascii=False)
        replace_atomically(file, content.encode())
        shown = [
            (image, text.generated, text.truth)
            for text, images in zip(texts, sample_images, strict=True)
            for image in images
        ]
        if shown:
            title = f"validation images after step {step}"
            plot_captions(shown, title, components.run_dir / "captions.png")
        return texts
