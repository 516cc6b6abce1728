"""The training loop: what happens in which order.

A step: wait for data, agree on sizes and wishes, plan, forward and backward of all microbatches,
queue the update, which changes nothing if a number is not finite, check the numbers, record; then,
where due, validate and save. Nothing here
depends on a model family, a layout or a data format. Every collective is unconditional, or
conditional on something all ranks agreed on.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch
from torch.profiler import record_function

from torchmm.common.device_copies import HostCopy
from torchmm.common.errors import DataError, NonFiniteError, PeerError, Preempted
from torchmm.common.rng import restore_rng
from torchmm.data.corrupt import CorruptLimit
from torchmm.data.loader import StepBatch
from torchmm.parallel.compilation import tell_graphs
from torchmm.parallel.gather import gather_floats
from torchmm.parallel.health.non_finite import where_non_finite
from torchmm.parallel.health.peers import Health, check_finite
from torchmm.planning.run_length import lost_steps_warning
from torchmm.recipe.read import what_was_trained
from torchmm.training.build import RunParts
from torchmm.training.ending import Status, StopSignal, closed_after, write_status
from torchmm.training.evaluation.benchmarks import FOLDER, Benchmarks
from torchmm.training.exports.write import Trained, write_adapters, write_export
from torchmm.training.memory import predicted_peak_bytes, save_memory
from torchmm.training.metrics import (
    StepMeter,
    expert_load,
    gather_rank_steps,
    make_record,
    peak_flops,
)
from torchmm.training.optim import Updates
from torchmm.training.planner import StepPlanner
from torchmm.training.profiling import StepProfiler
from torchmm.training.step import StepOutcome, TrainStep, gather_corrupt_samples, loss_weights
from torchmm.training.tracking.figures import StepRecord
from torchmm.training.validation import HeldOut


class Agreed(NamedTuple):
    """What all ranks know of a step before it begins."""

    targets: float
    """Positions that count in the text loss, in the global batch."""
    images: float
    """Images to be drawn, in the global batch."""
    samples: int
    skipped: int
    """Corrupt samples that were not met before."""
    stopping: bool
    """A rank was asked to stop: this step is the last."""
    without_data: bool
    """A rank has no data: nobody does the step."""
    has_corrupt: bool
    """Whether a rank could not decode a sample that the other ranks have not made blank yet."""


class Losses(NamedTuple):
    """Losses and gradient norm of a step, over all ranks, before its update."""

    loss: float
    text: float
    image: float
    grad_norm: float
    expert_load: float | None
    """`StepRecord.expert_load`."""


def _keep_what_stands() -> None:
    """What the first step has left stands until the end: no later one waits while Python looks for
    garbage among it, a third of a second at a time, on each rank in another step."""
    gc.collect()
    gc.freeze()


class Trainer:
    """The loop over steps of one rank.

    Args:
        on_lost: ends the process where a lost peer raises nothing, see `Health`.
    """

    def __init__(
        self, parts: RunParts, stop: StopSignal, on_lost: Callable[[PeerError], None] | None = None
    ) -> None:
        self.parts = parts
        recipe = parts.run.recipe
        mesh = parts.mesh
        restored = parts.restored
        self._recipe = recipe
        self.step = restored.step if restored else 0
        self._stop = stop
        self._undone = ""
        self._told = ""
        """The complaint that is in STATUS.json."""
        self._data_state: dict = restored.state["data"] if restored else {}
        self._best: float | None = restored.state.get("best") if restored else None
        """The lowest of `checkpoint.keep_best` so far."""
        self._corrupt = CorruptLimit(
            recipe.data.max_corrupt_samples,
            recipe.data.max_corrupt_fraction,
            parts.loader.samples_per_pass,
        )
        if restored:
            self._corrupt.add(**restored.state["corrupt"])
        weights = loss_weights(recipe.model.generator)
        self._planner = StepPlanner(
            parts.pipeline,
            parts.tuning,
            mesh,
            parts.logger,
            parts.costs,
            deterministic=recipe.training.deterministic,
            steps=recipe.training.steps,
        )
        self._train_step = TrainStep(parts.pipeline, mesh, weights)
        self._updates = Updates(
            parts.model,
            parts.optimizer,
            mesh,
            recipe.optimizer,
            recipe.training.steps,
            parts.average,
        )
        self._held_out = HeldOut(parts, weights)
        self.benchmarks = Benchmarks(recipe.validation.benchmarks, parts.run_dir, parts.logger)
        self._meter = StepMeter(mesh, parts.pipeline.descriptions)
        peak_tflops = recipe.metrics.peak_tflops
        self._peak_flops = (
            peak_tflops * 1e12 if peak_tflops else peak_flops(mesh.device, parts.pipeline.dtype)
        )
        self._timeline_step = min(recipe.metrics.timeline_step, recipe.training.steps)
        self._profiler = StepProfiler(recipe.metrics, parts.run_dir, mesh.rank, mesh.device)
        self._health = Health(
            parts.run_dir / "heartbeats",
            recipe.parallel.timeout_s,
            on_lost=on_lost,
            raises=mesh.device.type != "cuda",
        )

    def run(self) -> None:
        """All steps, then the results.

        Raises:
            Preempted: asked to stop; a checkpoint of the last finished step, if any, is saved.
            TorchmmError: see its subclasses.
        """
        steps = self._recipe.training.steps
        with closed_after(self.close):
            with self.parts.checkpoints:
                self._run_steps()
                if self.step >= steps and self._recipe.checkpoint.export_hf:
                    self._export_at_the_end()
                self._health.finish()
            if self.step >= steps:
                self._finish_benchmarks()
        if self.step < steps:
            saved = f"stopped after step {self.step}, which is saved"
            unsaved = "stopped before the first step; nothing is to be saved"
            complaint = self.complaint and f". {self.complaint}"
            raise Preempted((saved if self.step else unsaved) + self._undone + complaint)

    def _weights(self) -> list[tuple[str, Callable[[], AbstractContextManager[None]]]]:
        """What is exported: the weights, and their average, with what its directories' names end
        in."""
        average = self.parts.average
        return [("", nullcontext), *([] if average is None else [("-ema", average.in_place)])]

    def _validated(self) -> AbstractContextManager[None]:
        """In which what is validated is in the model."""
        average = self.parts.average
        if average is None or not self._recipe.validation.ema:
            return nullcontext()
        return average.in_place()

    def _export(self, name: str) -> None:
        """The model to a directory of the run."""
        recipe = self._recipe
        parts = self.parts
        metrics = parts.run_dir / "metrics.jsonl"
        told = what_was_trained(recipe)
        trained = Trained(recipe.name, self.step, recipe.training, recipe.data, metrics, told)
        with self._health.phase(self.step, "export"):
            write_export(parts.model, parts.run_dir / name, parts.tokenizer, trained)

    def _export_at_the_end(self) -> None:
        for suffix, weights in self._weights():
            with weights():
                self._export(f"hf{suffix}")
                write_adapters(self.parts.model, self.parts.run_dir / f"adapters{suffix}")

    def _export_on_the_way(self, record: StepRecord) -> None:
        """Exports that the recipe wants after this step; collective."""
        checkpoint = self._recipe.checkpoint
        if checkpoint.export_interval and self.step % checkpoint.export_interval == 0:
            for suffix, weights in self._weights():
                with weights():
                    self._export(f"hf-{self.step}{suffix}")
        if checkpoint.keep_best is None:
            return
        own = record.figure(checkpoint.keep_best.metric)
        [value], *_ = gather_floats([math.nan if own is None else own])  # rank 0 decides for all
        badness = checkpoint.keep_best.badness(value)
        if not math.isnan(badness) and (self._best is None or badness < self._best):
            self._best = badness
            with self._validated():
                self._export("hf-best")

    def _write_down(self, record: StepRecord) -> None:
        """With what has come to an end beside the steps."""
        parts = self.parts
        if parts.recorder is None:
            return
        if (answered := self.benchmarks.poll()) is not None:
            record = replace(record, scores={**(record.scores or {}), **answered.scores})
        if parts.recorder.record(replace(record, **parts.checkpoints.take_figures())):
            self._health.said()

    def _start_benchmarks(self) -> None:
        """With a snapshot of what is validated; collective."""
        folder = f"{FOLDER}/step-{self.step}"
        with self._validated():
            self._export(f"{folder}/hf")
        if self.parts.mesh.rank == 0:
            last = self.step == self._recipe.training.steps
            self.benchmarks.start(self.step, self.parts.run_dir / folder, last)

    def _finish_benchmarks(self) -> None:
        """Scores that are ready only now are those of the last step; a signal ends the waiting."""
        for answered in self.benchmarks.finish(lambda: self._stop.received is not None):
            assert self.parts.recorder is not None
            self.parts.recorder.add_scores(answered.scores)

    @property
    def complaint(self) -> str:
        """What went wrong without ending the run; empty: nothing."""
        return self.parts.checkpoints.complaint

    def close(self) -> None:
        """Ends the planning, the heartbeat and the records, each also if another cannot be."""
        with ExitStack() as ends:
            if self.parts.recorder:
                ends.callback(self.parts.recorder.close)
            ends.callback(self._health.close)
            ends.callback(self._planner.close)

    def _run_steps(self) -> None:
        """Trains until the last step, or until a rank was asked to stop."""
        parts = self.parts
        steps = self._recipe.training.steps
        batches = parts.loader.batches(lambda: self._stop.received is not None)
        if parts.restored and parts.restored.rng is not None:
            restore_rng(parts.restored.rng)
        if parts.mesh.rank == 0:
            write_status(parts.run_dir, Status("running", self.step, 0))
        if self.step >= steps:
            parts.logger.info(
                "all %d steps are done already; for more raise training.steps or "
                'training.epochs, for a new run change name or set checkpoint.resume = "none"',
                steps,
            )
        stopping = False
        first = self.step + 1
        while self.step < steps and not stopping:
            with self._profiler.step(self.step + 1), self._health.phase(self.step + 1, "step"):
                record, stopping = self.run_step(batches)
            if record is not None:  # all ranks had data
                record = self._validate(record)
                self._write_down(record)
                if self.step == first:
                    _keep_what_stands()
                if self.step == first + 2:  # the first steps compile and start workers
                    self._warn_of_lost_steps(record)
                self._export_on_the_way(record)
                if self._is_due(self._recipe.validation.benchmarks.interval):
                    self._start_benchmarks()
            with self._health.phase(self.step, "checkpoint"):
                if stopping or self._is_due(self._recipe.checkpoint.interval):
                    self._save(record)
            self._health.check(self.step)

    def _validate(self, record: StepRecord) -> StepRecord:
        """Return the record, with held-out losses if a validation is due; collective."""
        if self.parts.held_out is None or not self._is_due(self._recipe.validation.interval):
            return record
        with self._health.phase(self.step, "validation"), self._validated():
            return self._held_out.validate(self.step, record)

    def _warn_of_lost_steps(self, record: StepRecord) -> None:
        """Warn on rank 0 if a long run saves no checkpoint, from the measured step time."""
        hours = self._recipe.training.steps * record.step_ms / 3.6e6
        if self.parts.mesh.rank == 0 and (warning := lost_steps_warning(self._recipe, hours)):
            self.parts.logger.warning("%s", warning)

    def run_step(self, batches: Iterator[StepBatch | None]) -> tuple[StepRecord | None, bool]:
        """One optimizer step; its record, and whether any rank was asked to stop.

        Where a rank was, and has no data, no rank does the step, and there is no record.
        """
        parts = self.parts
        step = self.step + 1
        begin_s = time.perf_counter()
        with record_function("data"), self._health.waiting_for_data():
            batch = next(batches)
        wait_ms = (time.perf_counter() - begin_s) * 1e3
        agreed = self._agree(batch)
        if batch is None or agreed.without_data:
            self._undone = f". Data for step {step} did not come; see the ranks' logs"
            return None, True
        if agreed.has_corrupt:
            balanced = batch.encoded is not None
            corrupt = gather_corrupt_samples(batch.corrupt, parts.mesh, of_all_ranks=balanced)
            batch = parts.loader.settle(batch, corrupt)
            agreed = self._agree(batch)
        self._corrupt.add(agreed.skipped, agreed.samples)

        # The step itself: order of all actions, gradients, their norm, the update, the check. The
        # update is queued before the host waits for losses and norm, so that no device is idle.
        plan = self._planner.plan(step, batch.microbatches, parts.loader.next_metas)
        forward_backward = partial(
            self._train_step.run, plan, batch.microbatches, agreed.targets, agreed.images
        )
        outcome = forward_backward(annotate=step == self._recipe.metrics.profile_step)
        numbers = self._measure(outcome)
        lr = self._updates.apply(step)
        # CUDA is still computing: count, and plan the next step, before waiting for its results.
        counts = self._meter.count(batch)
        self._planner.plan_ahead(parts.loader.known_metas)
        losses = self._check(step, numbers, forward_backward)
        self._updates.finish()

        self._data_state = batch.state
        self.step = step
        skipped = self._corrupt.corrupt
        graphs = parts.compilation.new_graphs()
        tell_graphs(graphs, step, parts.logger)
        local = self._meter.measure(counts, outcome, begin_s, wait_ms, skipped, graphs)
        measured = gather_rank_steps(local)
        if step == self._timeline_step:
            if parts.mesh.pipeline_size > 1:
                self._planner.draw(parts.run_dir / "timeline", step, outcome, batch.microbatches)
            predicted = predicted_peak_bytes(
                parts.run, parts.pipeline, parts.mesh, outcome, batch.microbatches
            )
            save_memory(parts.run_dir, step, local.peak_memory_bytes, predicted, parts.mesh)
        step_ms = (time.perf_counter() - begin_s) * 1e3
        self._planner.learn(step, outcome, batch.microbatches, step_ms)
        record = make_record(
            step,
            measured,
            epoch=batch.epoch,
            loss=losses.loss,
            grad_norm=losses.grad_norm,
            lr=lr,
            peak_flops=self._peak_flops,
        )
        record = replace(
            record,
            **asdict(self._planner.figures),
            **batch.imbalance,
            expert_load=losses.expert_load,
            filtered_samples=batch.stream_total("filtered"),
            truncated_samples=batch.stream_total("dropped"),
        )
        if parts.model.generator is not None:
            record = replace(record, loss_text=losses.text, loss_image=losses.image)
        return record, agreed.stopping

    def _agree(self, batch: StepBatch | None) -> Agreed:
        """Sums over all ranks of what the step needs; collective.

        A rank that was asked to stop and has no data takes part all the same: others wait for it
        here, with the same parameters, and all can save these.
        """
        parts = self.parts
        microbatches = batch.microbatches if batch is not None else []
        counts = [
            sum(m.target_count for m in microbatches),
            sum(m.generated_count for m in microbatches),
            sum(len(m.meta.samples) for m in microbatches),
            len(batch.skipped) if batch is not None else 0,
        ]
        # Counts of ranks with the same samples differ until all ranks know the corrupt samples.
        corrupt = float(len(batch.corrupt)) if batch is not None else 0.0
        wishes = [self._stop.received is not None, parts.checkpoints.failed, batch is None]
        if batch is None:
            parts.logger.warning("step %d had no data: %s", self.step + 1, parts.loader.overdue)
        try:
            totals = parts.mesh.sum_over_data([*counts, *map(float, wishes), corrupt])
        except RuntimeError as error:
            if batch is not None:
                raise
            raise DataError(parts.loader.overdue) from error  # for want of which peers have left
        *sums, stopping, save_failed, without_data, unsettled = totals
        if save_failed:
            parts.checkpoints.wait()
        targets, images, samples, skipped = sums
        return Agreed(
            targets,
            images,
            int(samples),
            int(skipped),
            stopping > 0,
            without_data > 0,
            unsettled > 0,
        )

    def _measure(self, outcome: StepOutcome) -> HostCopy:
        """Return losses, gradient norm and expert load, which are still computed; collective."""
        load = expert_load(self.parts.model.llm.expert_loads, self.parts.mesh.device)
        norm = self._updates.measure(outcome.loss_of_each)
        return HostCopy(torch.stack([*outcome.loss_of_each, norm, load]))

    def _check(self, step: int, numbers: HostCopy, run_again: Callable[[], StepOutcome]) -> Losses:
        """Return losses and gradient norm over all ranks; collective.

        Args:
            numbers: those of `_measure`.
            run_again: forward and backward of the step.

        Raises:
            NonFiniteError: A loss or the gradient norm is not finite on some rank. The update has
                changed nothing.
        """
        mesh = self.parts.mesh
        # The one place where a step waits for its device (`torchmm.common.device_copies`).
        with self._health.waiting_for_device():
            *losses, grad_norm, busiest = numbers.tolist()
        loss, text, image = (value / mesh.own.sizes.tensor for value in losses)  # alike on these
        rows = gather_floats([loss, grad_norm, text, image])
        try:
            check_finite(step, ("loss", "grad_norm", "loss_text", "loss_image"), rows)
        except NonFiniteError as error:  # on all ranks alike
            where = where_non_finite(self.parts.model, run_again)
            raise NonFiniteError(f"{error}. Where: {where}") from None
        loss, _, text, image = (sum(column) for column in zip(*rows, strict=True))
        return Losses(loss, text, image, grad_norm, busiest or None)

    def _save(self, record: StepRecord | None) -> None:
        if not self.step:
            return  # nothing was done that the recipe does not say
        counts = {"corrupt": self._corrupt.corrupt, "seen": self._corrupt.seen}
        state = {"data": self._data_state, "corrupt": counts, "best": self._best}
        checkpoints = self.parts.checkpoints
        best = self._recipe.checkpoint.keep_best
        figures: dict[str, float | None] = {}
        if best is not None:
            figures[best.metric] = None if record is None else record.figure(best.metric)
        parts = self.parts
        checkpoints.save(
            self.step, parts.model, parts.optimizer, state, figures, average=parts.average
        )
        if checkpoints.complaint != self._told and self.parts.mesh.rank == 0:
            self._told = checkpoints.complaint
            write_status(self.parts.run_dir, Status("running", self.step, 0, message=self._told))

    def _is_due(self, interval: int) -> bool:
        """Whether something happens after this step that happens every `interval` steps, and after
        the last."""
        last = self.step == self._recipe.training.steps
        return interval > 0 and (last or self.step % interval == 0)
