"""Figures of each step: measured on every rank, combined, recorded by rank 0.

    meter.count(batch)                           every rank: tokens and FLOPs, before it waits
    meter.measure(counts, outcome, ...)          every rank: these and times
    meter.combine(step, local, ...)              one small collective at the end of the step
    MetricsRecorder.record(record)               rank 0: metrics.jsonl, progress line, trackers

metrics.jsonl is written first and for every step. Times in a record are those of the slowest
rank, as it decides how long a step takes. Times of modules are those of the plan's actions, as the
runtime records them. Rejected: averages over a logging window, which hide the one slow step in a
hundred.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from torchmm.common.layers import ModuleDescription
from torchmm.common.log import JsonlWriter, working
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.costs.devices import BF16_TFLOPS
from torchmm.costs.flops import microbatch_flops
from torchmm.data.loader import StepBatch
from torchmm.parallel.compilation import Graph
from torchmm.parallel.gather import gather_floats
from torchmm.parallel.mesh import ParallelMesh
from torchmm.recipe.training_section import MetricsConfig
from torchmm.training.report import ProgressLine, plot_loss
from torchmm.training.step import StepLosses, StepOutcome
from torchmm.training.tracking.figures import StepRecord, reduce_over_ranks
from torchmm.training.tracking.trackers import Sink, TrackedRun, start_trackers


@dataclass(frozen=True)
class RankStep:
    """Metrics of one rank in one step. `StepRecord` defines how they are reduced over ranks.

    Ranks of one pipeline or tensor-parallel group work on the same samples. Only the first of them
    counts tokens, samples, images and FLOPs; the values of the other ranks are 0.
    """

    tokens: int = 0
    """Tokens of the LLM's sequences without padding."""
    samples: int = 0
    images: int = 0
    """Read by encoders."""
    generated: int = 0
    """Images drawn by the generator."""
    flops: int = 0
    """Forward and backward, see `torchmm.costs.flops`."""
    skipped_samples: int = 0
    """Corrupt samples skipped since the run began."""
    step_ms: float = 0.0
    data_wait_ms: float = 0.0
    encoder_ms: float = 0.0
    llm_ms: float = 0.0
    generator_ms: float = 0.0
    pipeline_ms: float = 0.0
    """From the first action of the step's plan to the end of the last; 0 without a pipeline."""
    peak_memory_bytes: int = 0
    graphs: int = 0
    """Compiled in the step."""
    compile_ms: float = 0.0
    decoded_images: int = 0
    """By this rank, unlike those above."""
    read_bytes: int = 0


class StepMeter:
    """Metrics of the steps of one rank.

    Args:
        mesh: mesh of the run.
        modules: complete modules of the model.
        dtype: compute dtype.
        peak_tflops: peak of one device in TFLOP/s. If None, it is looked up or measured.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        modules: Sequence[ModuleDescription],
        dtype: torch.dtype,
        peak_tflops: float | None = None,
    ) -> None:
        self._mesh = mesh
        self._modules = modules
        self._peak_flops = peak_tflops * 1e12 if peak_tflops else peak_flops(mesh.device, dtype)

    def count(self, batch: StepBatch) -> RankStep:
        """Return tokens, samples, images and FLOPs of a step.

        Needs no results of the device. Call it before the step waits for its device, so that the
        count overlaps with the computation.
        """
        loaded = RankStep(decoded_images=batch.decoded_images, read_bytes=batch.read_bytes)
        if not self._mesh.is_first_of_samples:
            return loaded
        metas = [m.meta for m in batch.microbatches]
        flops = [
            microbatch_flops(self._modules, m.meta, m.target_count) for m in batch.microbatches
        ]
        return replace(
            loaded,
            tokens=sum(m.used_tokens for m in metas),
            samples=sum(len(m.samples) for m in metas),
            images=sum(m.image_count for m in metas),
            generated=sum(len(m.generated) for m in metas),
            flops=sum(f.forward + f.backward for by_name in flops for f in by_name.values()),
        )

    def measure(
        self,
        counts: RankStep,
        outcome: StepOutcome,
        begin_s: float,
        wait_ms: float,
        skipped: int,
        graphs: Sequence[Graph] = (),
    ) -> RankStep:
        """Return the metrics of a step that ends now.

        Args:
            counts: result of `count` for the batch of the step.
            outcome: result of the forward and backward passes.
            begin_s: start of the step in `time.perf_counter` seconds.
            wait_ms: time in which the step waited for data.
            skipped: number of corrupt samples of the run so far.
            graphs: graphs that were compiled in the step.
        """
        mesh = self._mesh
        llm_ms, generator_ms = (outcome.module_ms.get(m, 0.0) for m in (LLM, GENERATOR))
        return replace(
            counts,
            skipped_samples=skipped if mesh.rank == 0 else 0,
            step_ms=(time.perf_counter() - begin_s) * 1e3,
            data_wait_ms=wait_ms,
            encoder_ms=outcome.compute_ms - llm_ms - generator_ms,
            llm_ms=llm_ms,
            generator_ms=generator_ms,
            pipeline_ms=outcome.result.span_ms if mesh.pipeline_size > 1 else 0.0,
            peak_memory_bytes=peak_memory_bytes(mesh.device),
            graphs=len(graphs),
            compile_ms=sum(graph.compile_ms for graph in graphs),
        )

    def combine(
        self,
        step: int,
        local: RankStep,
        batch: StepBatch,
        losses: StepLosses,
        lr: float,
        planner: Mapping[str, Any],
    ) -> StepRecord:
        """Return the record of a step from the metrics of all ranks; collective.

        Args:
            step: number of the step.
            local: result of `measure`.
            batch: batch of this rank.
            losses: losses over all ranks.
            lr: learning rate.
            planner: metrics of the planner, by name.
        """
        record = make_record(
            step,
            gather_rank_steps(local),
            epoch=batch.epoch,
            loss=losses.loss,
            grad_norm=losses.grad_norm,
            lr=lr,
            peak_flops=self._peak_flops,
        )
        has_generator = any(module.name == GENERATOR for module in self._modules)
        return replace(
            record,
            **planner,
            **batch.imbalance,
            expert_load=losses.expert_load,
            loss_text=losses.text if has_generator else None,
            loss_image=losses.image if has_generator else None,
            filtered_samples=batch.stream_total("filtered"),
            truncated_samples=batch.stream_total("dropped"),
        )


def gather_rank_steps(local: RankStep) -> list[RankStep]:
    """Every rank's `RankStep`, on every rank (a collective; without a process group: its own)."""
    kinds = [type(default) for default in astuple(RankStep())]
    return [
        RankStep(*(kind(v) for kind, v in zip(kinds, row, strict=True)))
        for row in gather_floats(astuple(local))
    ]


def make_record(
    step: int,
    ranks: Sequence[RankStep],
    *,
    epoch: float,
    loss: float,
    grad_norm: float,
    lr: float,
    peak_flops: float | None,
) -> StepRecord:
    """Return the record of a step from the metrics of all ranks.

    Args:
        step: number of the step.
        ranks: metrics of each rank.
        epoch: passes over the data after the step.
        loss: mean loss over all ranks.
        grad_norm: global gradient norm.
        lr: learning rate.
        peak_flops: peak FLOP/s of one device; None if unknown.
    """
    reduced = reduce_over_ranks(ranks)
    per_s = 1e3 / reduced["step_ms"]
    busy_ms = [r.data_wait_ms + _compute_ms(r) for r in ranks]
    flops_per_s = sum(r.flops for r in ranks) * per_s
    return StepRecord(
        step=step,
        epoch=epoch,
        loss=loss,
        validation_loss=None,
        grad_norm=grad_norm,
        lr=lr,
        tokens_per_s=sum(r.tokens for r in ranks) * per_s,
        samples_per_s=sum(r.samples for r in ranks) * per_s,
        images_per_s=sum(r.images for r in ranks) * per_s,
        generated_per_s=sum(r.generated for r in ranks) * per_s or None,
        mfu=flops_per_s / (peak_flops * len(ranks)) if peak_flops else None,
        bubble_fraction=_bubble_fraction(ranks),
        slowest_rank=busy_ms.index(max(busy_ms)),
        straggler_share=1.0 - median(busy_ms) / max(busy_ms) if max(busy_ms) else 0.0,
        **reduced,
    )


def _compute_ms(step: RankStep) -> float:
    return step.encoder_ms + step.llm_ms + step.generator_ms


def _bubble_fraction(ranks: Sequence[RankStep]) -> float | None:
    span_ms = max(r.pipeline_ms for r in ranks)
    if span_ms == 0.0:
        return None
    return 1.0 - sum(_compute_ms(r) for r in ranks) / (span_ms * len(ranks))


class MetricsRecorder:
    """Rank 0's record of the run: metrics.jsonl, the progress line, trackers, the loss picture."""

    def __init__(
        self,
        config: MetricsConfig,
        run_dir: Path,
        *,
        name: str,
        steps: int,
        start_step: int,
        recipe: Mapping[str, Any],
        console: Console,
        log: logging.Logger,
    ) -> None:
        """Open the record of a run of `steps` steps, of which `start_step` are done.

        Records of later steps, left by a run that was stopped after its last checkpoint, are
        removed: they will be written again.
        """
        self._log = log
        self._log_interval = config.log_interval
        self._steps = steps
        self._run_dir = run_dir
        self._jsonl = JsonlWriter(run_dir / "metrics.jsonl", start_step)
        self._progress = ProgressLine(console, steps, start_step)
        run = TrackedRun(config, run_dir, name, recipe, log, start_step)
        self._trackers = start_trackers(run)
        self._sources: list[Callable[[StepRecord], StepRecord]] = []
        self._last: dict[str, Any] = {}
        """Record of the step before, as it was written."""

    def add_source(self, complete: Callable[[StepRecord], StepRecord]) -> None:
        """Call `complete` for each record before it is written.

        Use it for metrics that become available at any time, for example in a background thread.

        Args:
            complete: function that returns the record with more metrics.
        """
        self._sources.append(complete)

    def record(self, record: StepRecord) -> bool:
        """Write a step to metrics.jsonl and, every `log_interval` steps, show it.

        Returns:
            Whether the step was shown.
        """
        for complete in self._sources:
            record = complete(record)
        self._last = values = asdict(record)
        self._jsonl.write(values)
        shown = record.step % self._log_interval == 0 or record.step == self._steps
        shown = shown or record.validation_loss is not None
        for sink in self._sinks if shown else ():
            sink.emit(values)
        return shown

    def add_scores(self, scores: Mapping[str, float]) -> None:
        """To the record of the last step: scores that are known since."""
        scores = {**(self._last["scores"] or {}), **scores}
        self._last = {**self._last, "scores": scores}
        self._jsonl.replace_last(self._last)
        for tracker in self._trackers:
            tracker.emit({"step": self._last["step"], "scores": scores})

    @property
    def _sinks(self) -> list[Sink]:
        return [self._progress, *self._trackers]

    @working("finishing records and trackers")
    def close(self) -> None:
        """Finish all sinks and draw `loss.png`, for which alone no run fails."""
        self._sources.clear()  # they may refer to the run, and the run to this recorder
        try:
            self._jsonl.close()
        finally:
            for sink in self._sinks:
                sink.close()
        picture = self._run_dir / "loss.png"
        try:
            plot_loss(self._run_dir / "metrics.jsonl", picture)
        except (OSError, ImportError) as error:
            self._log.warning("cannot draw %s: %s", picture, error)


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory use so far: allocated on the CUDA device, resident in the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float | None:
    """Peak FLOP/s of one device; None for a GPU that is not in the table.

    CUDA: dense bfloat16 of the data sheet, whatever the dtype, so that runs compare. CPU:
    measured in `dtype` with this process's threads (about 0.3 s), since data sheets of CPUs say
    little about it.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((t * 1e12 for key, t in BF16_TFLOPS.items() if key in name), None)
    return _measure_matmul_flops(dtype)


def _measure_matmul_flops(dtype: torch.dtype) -> float:
    """Best of several square matrix products; bfloat16 is slow on CPUs without support.

    In CPU time, all threads busy: what other programs take is not a lower peak.
    """
    size = 768
    a = torch.ones(size, size, dtype=dtype)
    best_s = float("inf")
    deadline = time.perf_counter() + 0.3
    while time.perf_counter() < deadline:
        begin = time.process_time()
        a @ a
        best_s = min(best_s, (time.process_time() - begin) / torch.get_num_threads())
    return 2 * size**3 / best_s
