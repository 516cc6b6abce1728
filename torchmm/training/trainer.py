"""The training loop: what happens in which order, from a recipe to a trained model.

A step: wait for data, agree on sizes and wishes, forward and backward of all microbatches, agree
that all numbers are finite, update, record; then, where due, validate and save. Nothing here
depends on a model family, a layout or a data format. Every collective is unconditional, or
conditional on something all ranks agreed on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist

from torchmm.balance.costs.flops import microbatch_flops
from torchmm.common.batch import StepBatch
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import EXIT_DONE, DataError, Preempted
from torchmm.common.files import make_writable_directory
from torchmm.common.module_names import GENERATOR
from torchmm.common.rng import restore_rng
from torchmm.data.sources.corrupt import CorruptLimit
from torchmm.models.hf.export import export_hf
from torchmm.parallel.health import Health, check_finite, gather_floats, peer_errors
from torchmm.parallel.mesh import select_device, start_process_group
from torchmm.planning.open_sizes import orchestrated
from torchmm.recipe.recipe import Recipe
from torchmm.training.build import RunParts, build_run, build_unfilled_model
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.ending import (
    Status,
    StopSignal,
    closed_after,
    starting,
    training,
    write_end,
    write_failure,
    write_status,
)
from torchmm.training.layout_checks import check_layout
from torchmm.training.metrics import (
    PhaseTimer,
    RankStep,
    StepRecord,
    gather_rank_steps,
    make_record,
    peak_flops,
    peak_memory_bytes,
)
from torchmm.training.optim import (
    clip_factor,
    global_grad_norm,
    lr_factor,
    scale_gradients,
    set_learning_rate,
)
from torchmm.training.pictures import save_timeline
from torchmm.training.planner import Replanner, StepPlanner
from torchmm.training.profiling import StepProfiler
from torchmm.training.step import StepOutcome, TrainStep
from torchmm.training.validation import HeldOut


def train(recipe: Recipe) -> int:
    """Runs a whole recipe on this rank; the exit code. STATUS.json says how it ended.

    Raises:
        TorchmmError: the run ended early; the status is written.
    """
    run_dir = Path(recipe.output_dir) / recipe.name
    rank = int(os.environ.get("RANK", "0"))
    directory = CheckpointDirectory(run_dir / "checkpoints", logging.getLogger("torchmm"))
    trainer = None
    try:
        with StopSignal() as stop, starting(run_dir):
            make_writable_directory(run_dir)  # all ranks see that it is not, and none waits
            # Nothing is written into the directory of a run that is alive.
            if rank == 0 and directory.try_claim():
                write_status(run_dir, Status("running", 0, 0))  # how an earlier run ended is past
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            recipe = orchestrated(recipe, world_size)
            model, tokenizer = build_unfilled_model(recipe)
            check_layout(recipe, model, tokenizer, world_size)
            device = select_device(recipe.training.device)
            with peer_errors(rank):
                start_process_group(recipe.parallel, device)
                parts = build_run(recipe, run_dir, device, model, tokenizer, directory)
            trainer = Trainer(parts, stop)
            with training(run_dir):
                trainer.run()
        if rank == 0:
            write_end(run_dir, trainer.step)
    except BaseException as error:
        write_failure(run_dir, error, trainer.step if trainer else 0, rank, directory)
        raise
    finally:
        directory.release()
    dist.destroy_process_group()
    return EXIT_DONE


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
        self._held_out = HeldOut(run, self._loss_weights)
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
        self._undone = ""
        self._data_state: dict = run.restored.state["data"] if run.restored else {}
        self._replanner = Replanner(
            run.pipeline, run.descriptions, recipe.parallel.replan_drift, run.logger
        )

    def run(self) -> None:
        """All steps, then the results.

        Raises:
            Preempted: asked to stop; a checkpoint of the last finished step, if any, is saved.
            TorchmmError: see its subclasses.
        """
        steps = self.parts.recipe.training.steps
        with closed_after(self.close), self.parts.checkpoints:
            self._run_steps()
            if self.step >= steps and self.parts.recipe.checkpoint.export_hf:
                with self._health.phase(self.step, "export"):
                    export_hf(self.parts.model, self.parts.run_dir / "hf", self.parts.tokenizer)
        if self.step < steps:
            saved = f"stopped after step {self.step}, which is saved"
            told = saved if self.step else "stopped before the first step; nothing is to be saved"
            raise Preempted(told + self._undone)

    def close(self) -> None:
        """Ends the planning, the heartbeat and the records, each also if another cannot be."""
        with ExitStack() as ends:
            if self.parts.recorder:
                ends.callback(self.parts.recorder.close)
            ends.callback(self._health.close)
            ends.callback(self._planner.close)

    def _run_steps(self) -> None:
        """Trains until the last step, or until a rank was asked to stop."""
        run, steps = self.parts, self.parts.recipe.training.steps
        batches = run.loader.batches(lambda: self._stop.received is not None)
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
            if record is not None:  # all ranks had data
                with self._health.phase(self.step, "validation"):
                    if _is_due(run.recipe.validation.interval, self.step, last):
                        record = self._held_out.validate(self.step, record)
                if run.recorder:
                    run.recorder.record(record)
            with self._health.phase(self.step, "checkpoint"):
                if stopping or _is_due(run.recipe.checkpoint.interval, self.step, last):
                    self._save()
            self._health.check(self.step)

    def run_step(self, batches: Iterator[StepBatch | None]) -> tuple[StepRecord | None, bool]:
        """One optimizer step; its record, and whether any rank was asked to stop.

        Where a rank was, and has no data, no rank does the step, and there is no record.
        """
        run, mesh = self.parts, self.parts.mesh
        begin_s = time.perf_counter()
        with self._timer.phase("data"), self._health.waiting_for_data():
            batch = next(batches)
        if batch is not None:
            self._planner.begin(self.step + 1, run.loader.next_metas)
        global_targets, global_images, stopping, without_data = self._agree(batch)
        if batch is None or without_data:
            self._undone = f". Data for step {self.step + 1} did not come; see the ranks' logs"
            return None, True

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
        return record, stopping

    def _agree(self, batch: StepBatch | None) -> tuple[float, float, bool, bool]:
        """Sums of all ranks: targets, images to be drawn; whether one is to stop, or has no data.

        A rank that was asked to stop and has no data takes part all the same: others wait for it
        here, with the same parameters, and all can save these.
        """
        run = self.parts
        microbatches = batch.microbatches if batch is not None else []
        counts = [
            sum(m.target_count for m in microbatches),
            sum(m.generated_count for m in microbatches),
            sum(len(m.meta.samples) for m in microbatches),
            len(batch.skipped) if batch is not None else 0,
        ]
        wishes = [self._stop.as_float(), run.checkpoints.failed, batch is None]
        if batch is None:
            run.logger.warning("step %d had no data: %s", self.step + 1, run.loader.overdue)
        try:
            totals = run.mesh.sum_over_data([*counts, *map(float, wishes)])
        except RuntimeError as error:
            if batch is not None:
                raise
            raise DataError(run.loader.overdue) from error  # for want of which peers have left
        targets, images, samples, skipped, stopping, save_failed, without_data = totals
        if not without_data:
            self._corrupt.add(int(skipped), int(samples))
        if save_failed:
            run.checkpoints.wait()
        return targets, images, stopping > 0, without_data > 0

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

    def _save(self) -> None:
        run = self.parts
        if not self.step:
            return  # nothing was done that the recipe does not say
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
