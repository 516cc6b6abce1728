"""The training loop: what happens in which order, from a recipe to a trained model.

A step: wait for data, agree on sizes and wishes, forward and backward of all microbatches, agree
that all numbers are finite, update, record; then, where due, validate and save. Nothing here
depends on a model family, a layout or a data format. Every collective is unconditional, or
conditional on something all ranks agreed on.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from torchmm.balance.flops import microbatch_flops
from torchmm.batch import StepBatch
from torchmm.build import DTYPES, RunParts, build_data, build_run, build_unfilled_model
from torchmm.config import Recipe
from torchmm.config_model import GENERATOR
from torchmm.data.corrupt import CorruptLimit
from torchmm.drawings import draw_samples, held_out_drawings
from torchmm.encoder_choice import orchestrated
from torchmm.errors import EXIT_DONE, Preempted, TorchmmError
from torchmm.evaluate import (
    GeneratedText,
    generate_samples,
    held_out_losses,
    held_out_prompts,
    word_error_rate,
)
from torchmm.files import replace_atomically
from torchmm.layout_checks import check_layout
from torchmm.metrics import (
    PhaseTimer,
    RankStep,
    StepRecord,
    gather_rank_steps,
    make_record,
    peak_flops,
    peak_memory_bytes,
)
from torchmm.models.hf_export import export_hf
from torchmm.optim import (
    clip_factor,
    global_grad_norm,
    lr_factor,
    scale_gradients,
    set_learning_rate,
)
from torchmm.parallel.health import Health, check_finite, gather_floats, peer_errors
from torchmm.parallel.mesh import select_device, start_process_group
from torchmm.preempt import Status, StopSignal, write_status
from torchmm.profiling import StepProfiler
from torchmm.replanning import Replanner
from torchmm.report import draw_captions, draw_pictures
from torchmm.rng import restore_rng
from torchmm.step import StepOutcome, TrainStep
from torchmm.step_planning import StepPlanner
from torchmm.step_timeline import save_timeline


def train(recipe: Recipe) -> int:
    """Runs a whole recipe on this rank; the exit code. STATUS.json says how it ended.

    Raises:
        TorchmmError: the run ended early; the status is written.
    """
    run_dir = Path(recipe.output_dir) / recipe.name
    run_dir.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        write_status(run_dir, Status("running", 0, 0))  # how an earlier run ended is past
    trainer = None
    try:
        with StopSignal() as stop:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            recipe = orchestrated(recipe, world_size)
            model, tokenizer = build_unfilled_model(recipe)
            check_layout(recipe, model, tokenizer, world_size)
            device = select_device(recipe.training.device)
            with peer_errors(rank):
                start_process_group(recipe.parallel, device)
                parts = build_run(recipe, run_dir, device, model, tokenizer)
            trainer = Trainer(parts, stop)
            trainer.run()
    except BaseException as error:
        _write_failure(run_dir, error, trainer.step if trainer else 0, rank)
        raise
    if rank == 0:
        write_status(run_dir, Status("done", trainer.step, rank, EXIT_DONE))
    dist.destroy_process_group()
    return EXIT_DONE


def _write_failure(run_dir: Path, error: BaseException, step: int, rank: int) -> None:
    """STATUS.json of a run that ended early; an error that is known already is marked so."""
    if not isinstance(error, TorchmmError):
        write_status(run_dir, Status("failed", step, rank, 1, traceback.format_exc()))
        return
    state: Literal["preempted", "failed"] = "failed"
    if isinstance(error, Preempted):
        state = "preempted"
    status = Status(state, step, rank, error.exit_code, str(error))
    error.reported = not write_status(run_dir, status)


class Trainer:
    """The loop over steps of one rank."""

    def __init__(self, run: RunParts, stop: StopSignal) -> None:
        self.parts = run
        recipe, mesh = run.recipe, run.mesh
        self.step = run.restored.step if run.restored else 0
        self._stop = stop
        self._timer = PhaseTimer(mesh.device)
        self._loss_weights = _loss_weights(recipe)
        self._train_step = TrainStep(run.pipeline, mesh, self._loss_weights)
        self._parameters = [p for p in run.model.parameters() if p.requires_grad]
        self._copies = run.model.tied_copy_parameters()
        self._peak_flops = (
            recipe.metrics.peak_tflops * 1e12
            if recipe.metrics.peak_tflops
            else peak_flops(mesh.device, DTYPES[recipe.training.dtype])
        )
        self._corrupt = CorruptLimit(
            recipe.data.max_corrupt_samples, recipe.data.max_corrupt_fraction
        )
        if run.restored:
            self._corrupt.add(**run.restored.state["corrupt"])
        self._held_out: list[StepBatch] | None = None
        self._timeline_step = min(recipe.metrics.timeline_step, recipe.training.steps)
        self._profiler = StepProfiler(recipe.metrics, run.run_dir, mesh.rank, mesh.device)
        self._planner = StepPlanner(
            run.pipeline,
            run.descriptions,
            mesh,
            run.logger,
            deterministic=recipe.training.deterministic,
            steps=recipe.training.steps,
        )
        self._health = Health(run.run_dir / "heartbeats", recipe.parallel.timeout_s)
        self._data_state: dict = {}
        self._replanner = Replanner(
            run.pipeline, run.descriptions, recipe.parallel.replan_drift, run.logger
        )

    def run(self) -> None:
        """All steps, then the results.

        Raises:
            Preempted: asked to stop; a checkpoint of the last finished step is saved.
            TorchmmError: see its subclasses.
        """
        steps = self.parts.recipe.training.steps
        try:
            with self.parts.checkpoints:
                self._run_steps()
                if self.step >= steps and self.parts.recipe.checkpoint.export_hf:
                    with self._health.phase(self.step, "export"):
                        export_hf(self.parts.model, self.parts.run_dir / "hf", self.parts.tokenizer)
        finally:
            self.close()
        if self.step < steps:
            raise Preempted(f"stopped after step {self.step}, which is saved")

    def close(self) -> None:
        """Ends the heartbeat, the planning and the records."""
        self._planner.close()
        self._health.close()
        if self.parts.recorder:
            self.parts.recorder.close()

    def _run_steps(self) -> None:
        """Trains until the last step, or until a rank was asked to stop."""
        run, steps = self.parts, self.parts.recipe.training.steps
        batches = iter(run.loader)
        if run.restored and run.restored.rng is not None:
            restore_rng(run.restored.rng)
        self._write_running()
        if self.step >= steps:
            run.logger.info(
                "all %d steps are done already; for more raise training.steps, for a new run "
                'change name or set checkpoint.resume = "none"',
                steps,
            )
        stopping = False
        while self.step < steps and not stopping:
            with self._profiler.step(self.step + 1), self._health.phase(self.step + 1, "step"):
                record, stopping = self.run_step(batches)
            last = self.step == steps
            with self._health.phase(self.step, "validation"):
                if _is_due(run.recipe.validation.interval, self.step, last):
                    record = self._validate(record)
            if run.recorder:
                run.recorder.record(record)
            with self._health.phase(self.step, "checkpoint"):
                if stopping or _is_due(run.recipe.checkpoint.interval, self.step, last):
                    self._save()
            self._health.check(self.step)

    def run_step(self, batches: Iterator[StepBatch]) -> tuple[StepRecord, bool]:
        """One optimizer step; its record, and whether any rank was asked to stop."""
        run, mesh = self.parts, self.parts.mesh
        begin_s = time.perf_counter()
        with self._timer.phase("data"):
            batch = next(batches)
        self._planner.begin(self.step + 1, run.loader.next_metas)
        targets = sum(m.target_count for m in batch.microbatches)
        images = sum(m.generated_count for m in batch.microbatches)
        samples = sum(len(m.meta.samples) for m in batch.microbatches)
        wishes = [self._stop.as_float(), float(run.checkpoints.failed)]
        totals = mesh.sum_over_data([targets, images, samples, len(batch.skipped), *wishes])
        global_targets, global_images, all_samples, skipped, stopping, save_failed = totals
        self._corrupt.add(int(skipped), int(all_samples))
        if save_failed:
            run.checkpoints.wait()

        step = self.step + 1
        annotate = step == run.recipe.metrics.profile_step
        outcome = self._train_step.run(batch.microbatches, global_targets, annotate, global_images)
        ranks = mesh.norm_ranks, mesh.norm_sharing
        grad_norm = global_grad_norm(self._parameters, self._copies, *ranks).item()
        losses = (outcome.loss, *(outcome.losses[name] for name in ("llm", GENERATOR)))
        loss, text, image = (loss.item() / mesh.tensor_size for loss in losses)
        rows = gather_floats([loss, grad_norm, text, image])
        check_finite(step, ("loss", "grad_norm", "loss_text", "loss_image"), rows)
        loss, _, text, image = map(sum, zip(*rows, strict=True))

        lr = self._update(grad_norm)
        self._data_state = batch.state
        self.step = step
        measured = gather_rank_steps(self._measure(batch, outcome, begin_s))
        if mesh.pipeline_size > 1 and step == self._timeline_step:
            directory = run.run_dir / "timeline"
            save_timeline(directory, step, outcome, batch.microbatches, mesh)
            self._planner.draw(directory, step, outcome)
        self._planner.observe(outcome, (time.perf_counter() - begin_s) * 1e3)
        self._replanner.observe(step, outcome, batch.microbatches)
        record = make_record(
            self.step,
            measured,
            epoch=batch.epoch,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            peak_flops=self._peak_flops,
        )
        record = replace(record, **asdict(self._planner.figures))
        if run.model.generator is not None:
            record = replace(record, loss_text=text, loss_image=image)
        return record, stopping > 0

    def _update(self, grad_norm: float) -> float:
        """Clips and applies the gradients; the learning rate used."""
        run = self.parts
        config = run.recipe.optimizer
        factor = lr_factor(self.step + 1, run.recipe.training.steps, config)
        set_learning_rate(run.optimizer, factor)
        clip = clip_factor(grad_norm, config.max_grad_norm)
        if clip < 1.0:
            scale_gradients(self._parameters, clip)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        return config.lr * factor

    def _measure(self, batch: StepBatch, outcome: StepOutcome, begin_s: float) -> RankStep:
        mesh = self.parts.mesh
        times_ms = self._timer.finish_step()
        llm_ms, generator_ms = (outcome.module_ms.get(m, 0.0) for m in ("llm", GENERATOR))
        counts = {}
        if mesh.mesh.get_local_rank("tensor") == 0 and mesh.pipeline_rank == 0:
            metas = [m.meta for m in batch.microbatches]
            flops = [
                microbatch_flops(self.parts.descriptions, m.meta, m.target_count)
                for m in batch.microbatches
            ]
            counts = {
                "tokens": sum(m.used_tokens for m in metas),
                "samples": sum(len(m.samples) for m in metas),
                "images": sum(m.image_count for m in metas),
                "generated": sum(len(m.generated) for m in metas),
                "flops": sum(f.forward + f.backward for by_name in flops for f in by_name.values()),
                "skipped_samples": self._corrupt.corrupt if mesh.rank == 0 else 0,
            }
        return RankStep(
            step_ms=(time.perf_counter() - begin_s) * 1e3,
            data_wait_ms=times_ms.get("data", 0.0),
            encoder_ms=outcome.compute_ms - llm_ms - generator_ms,
            llm_ms=llm_ms,
            generator_ms=generator_ms,
            pipeline_ms=outcome.span_ms if mesh.pipeline_size > 1 else 0.0,
            peak_memory_bytes=peak_memory_bytes(mesh.device),
            **counts,
        )

    def _validate(self, record: StepRecord) -> StepRecord:
        """Held-out losses into the record; text into samples.json, drawings into drawings/."""
        run, config = self.parts, self.parts.recipe.validation
        run.model.eval()
        if self._held_out is None:
            loader = build_data(run.recipe, run.model, run.tokenizer, run.mesh, validation=True)
            self._held_out = list(islice(loader, config.batches))
        losses = held_out_losses(run.pipeline, self._held_out, run.mesh)
        if config.samples:
            texts = self._generate()
            if any(text.duration_ms for text in texts):
                record = replace(record, word_error_rate=word_error_rate(texts))
        if config.drawings:
            self._draw()
        run.model.train()
        if run.model.generator is None:
            return replace(record, validation_loss=losses["llm"])
        return replace(
            record,
            validation_loss=sum(self._loss_weights[name] * losses[name] for name in losses),
            validation_loss_text=losses["llm"],
            validation_loss_image=losses[GENERATOR],
        )

    def _draw(self) -> None:
        """Drawings for held-out texts into a picture of this step."""
        run, config = self.parts, self.parts.recipe.validation
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
            title = f"drawn after step {self.step} (and the held-out images themselves)"
            shown = [(d.truth, d.drawn, d.text(run.tokenizer)) for d in drawn]
            draw_pictures(shown, title, directory / f"step-{self.step}.png")

    def _generate(self) -> list[GeneratedText]:
        """Text for held-out images and sounds into samples.json and captions.png."""
        run, config = self.parts, self.parts.recipe.validation
        loader = build_data(
            run.recipe, run.model, run.tokenizer, run.mesh, validation=True, for_prompts=True
        )
        prompts = held_out_prompts(loader, config.samples)
        texts = generate_samples(
            run.pipeline, prompts, run.tokenizer, run.mesh, config.max_new_tokens
        )
        if run.mesh.rank > 0 or not texts:
            return texts
        self._append_samples([{"step": self.step, **asdict(t)} for t in texts])
        shown = [
            (image, text.generated, text.truth)
            for text in texts
            for image in loader.images(text.source, text.index)[:1]
        ]
        if shown:
            title = f"held-out images after step {self.step}"
            draw_captions(shown, title, run.run_dir / "captions.png")
        return texts

    def _append_samples(self, samples: list[dict]) -> None:
        file = self.parts.run_dir / "samples.json"
        earlier = json.loads(file.read_text()) if file.exists() else []
        kept = [s for s in earlier if s["step"] < self.step]
        text = json.dumps(kept + samples, indent=1, ensure_ascii=False)
        replace_atomically(file, text.encode())

    def _save(self) -> None:
        run = self.parts
        counts = {"corrupt": self._corrupt.corrupt, "seen": self._corrupt.seen}
        state = {"data": self._data_state, "corrupt": counts}
        run.checkpoints.save(self.step, run.model, run.optimizer, state)

    def _write_running(self) -> None:
        if self.parts.mesh.rank == 0:
            write_status(self.parts.run_dir, Status("running", self.step, 0))


def _loss_weights(recipe: Recipe) -> dict[str, float]:
    """Factors of the losses, by module."""
    generator = recipe.model.generator
    if generator is None:
        return {}
    return {"llm": generator.text_loss_weight, GENERATOR: generator.loss_weight}


def _is_due(interval: int, step: int, last: bool) -> bool:
    return interval > 0 and (last or step % interval == 0)
