"""The table of metrics, and the metrics that ranks measure in each step.

    METRICS["step_ms"]                     group, unit, description, reduction over ranks, format
    counts = meter.count(batch)            every rank, while the device computes
    local = meter.measure(counts, ...)     every rank: values of the metrics with a reduction
    record = meter.combine(local, ...)     every rank: one small collective at the end of the step

The record of a step is a dict with one value for each name of `METRICS`. metrics.jsonl has one
record per line, and trackers show the value of "step_ms" as "time/step_ms".

To add a metric that ranks measure, add an entry with a reduction to `METRICS`, and its value to
`StepMeter.count` or `measure`. To add a metric of planning or of a hook, add an entry without a
reduction: planners return values in `StepPlan.statistics`, hooks set values in
`FinishedStep.record`. metrics.jsonl, the progress line, trackers and the reference page then have
the metric.

Times in a record are times of the slowest rank, because it determines the duration of a step. They
are not averaged over a logging window, which would hide single slow steps.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from torchmm.common.module_names import GENERATOR, LLM
from torchmm.costs.devices import BF16_TFLOPS
from torchmm.costs.flops import microbatch_flops
from torchmm.data.loader import StepBatch
from torchmm.parallel.compilation import CompiledGraph
from torchmm.parallel.gather import gather_floats
from torchmm.parallel.mesh import ParallelMesh
from torchmm.training.pipeline import Pipeline
from torchmm.training.step import StepOutcome

Group = Literal[
    "train", "validation", "time", "memory", "pipeline", "balance", "data", "planner", "checkpoint"
]
Record = dict[str, Any]
"""Values of the metrics of one step by name. None if a metric is not applicable."""


class Metric(NamedTuple):
    """Definition of a metric."""

    group: Group
    """Group of panels in trackers."""
    unit: str
    """Unit, or "" for plain numbers and text."""
    description: str
    """Documentation: one or more sentences."""
    value_type: type = float
    nullable: bool = False
    """Whether the value may be None. A reduction to 0 is then None."""
    reduce: Literal["max", "sum", "rate"] | None = None
    """Reduction over ranks. "rate" is the sum divided by the duration of the step in seconds.

    If None, ranks do not measure the metric.
    """
    progress_format: str = ""
    """Format in the progress line. If empty, the progress line does not show the metric."""
    scale: float = 1.0
    """Factor of the value in the progress line."""


# fmt: off
METRICS: Mapping[str, Metric] = {
    "step": Metric("train", "", "Number of the optimizer step, from 1.", int),
    "epoch": Metric(
        "data", "",
        "Passes over the training samples after the step: samples trained on, divided by the "
        "usable samples of the source, for the source with the fewest passes. Streams count as "
        "0 during the first pass, in which their length is unknown."),
    "loss": Metric(
        "train", "nats",
        "Mean loss per target token of the global batch, or per preference pair. With a "
        "generator: weighted sum of `loss_text` and `loss_image`.",
        progress_format="loss {:.4f}"),
    "loss_text": Metric(
        "train", "nats", "With a generator: mean loss per target token of the text.",
        nullable=True, progress_format="text {:.4f}"),
    "loss_image": Metric(
        "train", "",
        "With a generator: squared error of the velocity, averaged over pixels and images.",
        nullable=True, progress_format="image {:.4f}"),
    "loss_by_source": Metric(
        "train", "nats",
        "Mean loss per target token of the text of each data source, by source name. Sources "
        "without targets in the step are omitted. Null for runs with one source.",
        dict, nullable=True),
    "loss_smoothed": Metric(
        "train", "nats",
        "With `training.label_smoothing`: mean smoothed cross entropy per target token.",
        nullable=True),
    "loss_z": Metric(
        "train", "", "With `training.z_loss`: mean z-loss per target token.",
        nullable=True),
    "preference": Metric(
        "train", "",
        'With `training.loss` = "preference": means over the pairs of the step, with the names of '
        "TRL. `rewards/chosen` and `rewards/rejected` are the scores of the answers times `beta`, "
        "`rewards/margins` is their difference, and `rewards/accuracies` the fraction of pairs "
        "whose chosen answer has the larger reward.",
        dict, nullable=True),
    "validation_loss": Metric(
        "validation", "nats", "`loss` on held-out samples. Null in steps without validation.",
        nullable=True, progress_format="held-out loss {:.4f}"),
    "validation_loss_text": Metric(
        "validation", "nats", "`loss_text` on held-out samples.",
        nullable=True, progress_format="text {:.4f}"),
    "validation_loss_image": Metric(
        "validation", "", "`loss_image` on held-out samples.",
        nullable=True, progress_format="image {:.4f}"),
    "validation_loss_by_source": Metric(
        "validation", "nats",
        "`loss_by_source` on held-out samples. Null for runs with one held-out source.",
        dict, nullable=True),
    "word_error_rate": Metric(
        "validation", "fraction",
        "Word error rate of the text generated for held-out audio and videos.",
        nullable=True, progress_format="word errors {:.1%}"),
    "scores": Metric(
        "validation", "",
        'Metrics of generated text by "SOURCE/METRIC", for validation sources with metrics, and of '
        'benchmarks by "TASK/METRIC". A benchmark result is part of the record of the step in '
        "which it becomes available, or of the last step.",
        dict, nullable=True, progress_format="{:.3f}"),
    "grad_norm": Metric("train", "", "Global gradient norm before clipping."),
    "lr": Metric("train", "", "Learning rate of the step (`optimizer.lr`)."),
    "max_expert_load_ratio": Metric(
        "train", "",
        "Largest number of tokens of one expert, divided by the mean over the experts of the "
        "layer. Counts all ranks and is averaged over layers. The minimum is 1, the maximum the "
        "number of experts. Null without experts, or if their layers are compiled.",
        nullable=True),
    "tokens_per_s": Metric(
        "time", "1/s", "Tokens of all ranks, without padding.",
        reduce="rate", progress_format="{:,.0f} tokens/s"),
    "samples_per_s": Metric(
        "time", "1/s", "Samples of all ranks.",
        reduce="rate", progress_format="{:.1f} samples/s"),
    "media_per_s": Metric(
        "time", "1/s", "Images, audio clips and videos that encoders read, of all ranks.",
        reduce="rate", progress_format="{:.1f} images/s"),
    "generated_images_per_s": Metric(
        "time", "1/s", "Images and videos that the generator is trained on, of all ranks.",
        nullable=True, reduce="rate", progress_format="{:.1f} generated/s"),
    "mfu": Metric(
        "time", "0..1",
        "Model FLOPs, including encoders, divided by step time and peak FLOP/s of all devices. "
        "Null if the peak is unknown. On a CPU the peak is measured at every start, so compare "
        "`tokens_per_s` instead.",
        nullable=True, progress_format="MFU {:.1f} %", scale=100),
    "peak_memory_bytes": Metric(
        "memory", "bytes",
        "Peak memory of the rank with the highest use since its start: device memory on CUDA, "
        "process memory on a CPU.",
        int, reduce="max", progress_format="{:.2f} GiB", scale=2**-30),
    "step_ms": Metric("time", "ms", "Duration of the step on the slowest rank.", reduce="max"),
    "data_wait_ms": Metric(
        "time", "ms", "Time for which the step waited for data, on the slowest rank.",
        reduce="max", progress_format="data wait {:.0f} %", scale=100),
    "encoder_ms": Metric(
        "time", "ms", "Forward and backward passes of all encoders, on the slowest rank.",
        nullable=True, reduce="max", progress_format="encoder {:.0f} ms"),
    "llm_ms": Metric(
        "time", "ms", "Forward and backward passes of the LLM, on the slowest rank.",
        nullable=True, reduce="max", progress_format="LLM {:.0f} ms"),
    "generator_ms": Metric(
        "time", "ms", "Forward and backward passes of the generator, on the slowest rank.",
        nullable=True, reduce="max", progress_format="generator {:.0f} ms"),
    "pipeline_ms": Metric(
        "pipeline", "ms",
        "Time from the first to the last action of the plan, on the slowest rank. "
        "Null without a pipeline.",
        nullable=True, reduce="max"),
    "bubble_fraction": Metric(
        "pipeline", "0..1",
        "Fraction of `pipeline_ms` without forward and backward passes, averaged over ranks. "
        "Null without a pipeline.",
        nullable=True, progress_format="bubbles {:.0f} %", scale=100),
    "slowest_rank": Metric(
        "pipeline", "",
        "Rank with the most time in data wait and in modules. Module time includes waiting in "
        "collectives, so this metric detects slow data loading better than slow devices.",
        int),
    "straggler_fraction": Metric(
        "pipeline", "0..1",
        "1 minus the time of the median rank divided by the time of `slowest_rank`. 0 means "
        "equally fast ranks."),
    "compiled_graphs": Metric(
        "time", "", "Layer graphs compiled in the step, on the rank with the most.",
        int, reduce="max"),
    "compile_ms": Metric(
        "time", "ms", "Compile time of the slowest rank. Null if no graph was compiled.",
        nullable=True, reduce="max"),
    "decoded_media": Metric(
        "data", "",
        "Images, audio files and videos (or frames) that all ranks decoded for the step, counted "
        "once per encoder, and target images. Corrupt samples are excluded.",
        int, reduce="sum"),
    "data_read_bytes": Metric(
        "data", "bytes",
        "Size of the records and files that all ranks read. Every rank reads the records of its "
        "samples, including embedded files, and other files only to decode them. One character "
        "is one byte.",
        int, reduce="sum"),
    "skipped_samples": Metric(
        "data", "", "Corrupt samples skipped since the start of the run.", int, reduce="sum"),
    "filtered_samples": Metric(
        "data", "",
        "Samples of streams excluded by `filter` or a limit, since the start of the run. Null "
        "without streams: the counts of other sources are logged at the start.",
        int, nullable=True),
    "truncated_samples": Metric(
        "data", "",
        "Samples of streams with dropped text, images or video frames, once per type of content, "
        "since the start of the run. Null without streams.",
        int, nullable=True),
    "image_imbalance": Metric(
        "balance", "",
        "With `data.balance`: encoder and generator compute of the most loaded rank in each "
        "microbatch, divided by the mean over ranks, estimated from image sizes. 1 means equal "
        "load. Null if images are not balanced.",
        nullable=True),
    "image_imbalance_before": Metric(
        "balance", "", "`image_imbalance` without balancing.",
        nullable=True),
    "sequence_imbalance": Metric(
        "balance", "",
        "With `data.reorder`: predicted time of the slowest rank, divided by the mean over ranks. "
        "Ranks that synchronize in every layer are compared per microbatch, other ranks per "
        "step. With balanced images, encoders are excluded. 1 means equal load. Null without "
        "reordering.",
        nullable=True),
    "sequence_imbalance_before": Metric(
        "balance", "", "`sequence_imbalance` in the original order.",
        nullable=True),
    "predicted_step_ms": Metric(
        "planner", "ms",
        "With a searched schedule: predicted time of the forward and backward passes of the first "
        "pipeline, from measured times of earlier steps. With Optimus: predicted time of the "
        "complete plan. Compare it with `pipeline_ms`, the time of the slowest pipeline.",
        nullable=True),
    "planner": Metric(
        "planner", "",
        'Schedule of the step: "search" (found by the schedule search), "natural" (default order), '
        'a static schedule that is as fast, "optimus coarse", "optimus fine" or '
        '"optimus launched".',
        str, nullable=True),
    "planner_ms": Metric(
        "planner", "ms",
        "Planning time of the step, including the schedule search. Planning runs during the "
        "previous step or before the step.",
        nullable=True),
    "planner_evaluations": Metric(
        "planner", "", "Schedules that the search simulated.", int, nullable=True),
    "speedup_over_default_order": Metric(
        "planner", "fraction",
        "Predicted gain: additional time of the default order, or of the best coarse Optimus plan, "
        "relative to the selected plan.",
        nullable=True),
    "checkpoint_wait_ms": Metric(
        "checkpoint", "ms",
        "Time for which training waited for a checkpoint. This metric and the next four describe "
        "rank 0, and the saves and uploads that finished since the previous record.",
        nullable=True),
    "checkpoint_save_ms": Metric(
        "checkpoint", "ms", "Time from the end of that wait until the checkpoint was committed.",
        nullable=True),
    "checkpoint_bytes": Metric(
        "checkpoint", "bytes", "Size of the checkpoint.", int, nullable=True),
    "checkpoint_upload_ms": Metric(
        "checkpoint", "ms",
        "Upload time of a checkpoint, over all ranks.", nullable=True),
    "checkpoint_upload_bytes": Metric(
        "checkpoint", "bytes", "Size of the uploaded files.", int, nullable=True),
    "checkpoint_upload_failures": Metric(
        "checkpoint", "",
        "Checkpoints that could not be uploaded since this start. Null if none failed.",
        int, nullable=True),
}
# fmt: on
"""All metrics by name, in the order of metrics.jsonl and of the progress line."""


def metric_value(record: Mapping[str, Any], name: str) -> float | None:
    """Return the value of a metric or score in a record, or None if the record has no value."""
    value: float | None = (record["scores"] or {}).get(name, record.get(name))
    return value


def group_by_panel(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record by their names in trackers, "GROUP/NAME".

    The step, text and None are omitted. Scores have the names "validation/SOURCE/SCORE".
    """
    panels: dict[str, Any] = {}
    for name, value in record.items():
        if name == "step" or value is None or isinstance(value, str):
            continue
        group = METRICS[name].group
        values = value if isinstance(value, Mapping) else {name: value}
        panels |= {f"{group}/{key}": number for key, number in values.items()}
    return panels


class StepMeter:
    """Metrics of the steps of one rank.

    Args:
        mesh: Mesh of the run.
        pipeline: Pipeline of this rank.
        peak_tflops: Peak of one device in TFLOP/s. If None, it is looked up or measured.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        pipeline: Pipeline,
        peak_tflops: float | None = None,
    ) -> None:
        self._mesh = mesh
        self._modules = pipeline.descriptions
        dtype = pipeline.dtype
        self._peak_flops = peak_tflops * 1e12 if peak_tflops else peak_flops(mesh.device, dtype)

    def count(self, batch: StepBatch) -> dict[str, float]:
        """Return the values of the metrics that depend only on the batch.

        Requires no results of the device. Call it before the step waits for its device, so that the
        count overlaps with the computation. The result also has "flops": forward and backward FLOPs
        of the model, see `torchmm.costs.flops`.
        """
        # Ranks of one pipeline or tensor-parallel group work on the same samples. Only the first of
        # these ranks counts tokens and samples, but every rank decodes and reads its local data.
        counted = batch.microbatches if self._mesh.is_first_sample_rank else []
        metas = [m.meta for m in counted]
        flops = [microbatch_flops(self._modules, m.meta, m.target_count) for m in counted]
        return {
            "tokens_per_s": sum(m.used_tokens for m in metas),
            "samples_per_s": sum(len(m.samples) for m in metas),
            "media_per_s": sum(m.image_count for m in metas),
            "generated_images_per_s": sum(len(m.generated) for m in metas),
            "flops": sum(f.forward + f.backward for by_name in flops for f in by_name.values()),
            "decoded_media": batch.decoded_media,
            "data_read_bytes": batch.read_bytes,
        }

    def measure(
        self,
        counts: Mapping[str, float],
        outcome: StepOutcome,
        begin_s: float,
        wait_ms: float,
        skipped: int,
        graphs: Sequence[CompiledGraph] = (),
    ) -> dict[str, float]:
        """Return the values of this rank for a step that ends now.

        Args:
            counts: Result of `count` for the batch of the step.
            outcome: Result of the forward and backward passes.
            begin_s: Start of the step in `time.perf_counter` seconds.
            wait_ms: Time in which the step waited for data.
            skipped: Number of corrupt samples of the run so far.
            graphs: Graphs that were compiled in the step.
        """
        mesh = self._mesh
        llm_ms, generator_ms = (outcome.module_ms.get(name, 0.0) for name in (LLM, GENERATOR))
        return {
            **counts,
            "skipped_samples": skipped if mesh.rank == 0 else 0,
            "step_ms": (time.perf_counter() - begin_s) * 1e3,
            "data_wait_ms": wait_ms,
            "encoder_ms": outcome.compute_ms - llm_ms - generator_ms,
            "llm_ms": llm_ms,
            "generator_ms": generator_ms,
            "pipeline_ms": outcome.result.span_ms if mesh.plan_size > 1 else 0.0,
            "peak_memory_bytes": peak_memory_bytes(mesh.device),
            "compiled_graphs": len(graphs),
            "compile_ms": sum(graph.compile_ms for graph in graphs),
        }

    def combine(self, local: Mapping[str, float], batch: StepBatch, **extra_metrics: Any) -> Record:
        """Return the record of a step from the values of all ranks; collective.

        Args:
            local: Result of `measure`.
            batch: Batch of this rank.
            extra_metrics: Metrics that are equal on all ranks, and metrics of planning the step.
        """
        ranks = [dict(zip(local, row, strict=True)) for row in gather_floats([*local.values()])]
        record = make_record(
            ranks,
            self._peak_flops,
            **extra_metrics,
            **batch.imbalance,
            epoch=batch.epoch,
            filtered_samples=batch.stream_total("filtered"),
            truncated_samples=batch.stream_total("dropped"),
        )
        if not any(module.name == GENERATOR for module in self._modules):
            record["loss_text"] = record["loss_image"] = None
        return record


def make_record(
    ranks: Sequence[Mapping[str, float]], peak_flops: float | None, **extra_metrics: Any
) -> Record:
    """Return a record with the values of all ranks, reduced over ranks.

    Args:
        ranks: Values of the metrics with a reduction, and "flops", by rank.
        peak_flops: Peak FLOP/s of one device; None if unknown.
        extra_metrics: Values of other metrics.
    """
    record: Record = dict.fromkeys(METRICS)
    per_s = 1e3 / max(rank["step_ms"] for rank in ranks)
    for name, metric in METRICS.items():
        if metric.reduce is not None:
            values = [rank[name] for rank in ranks]
            value = max(values) if metric.reduce == "max" else sum(values)
            value = metric.value_type(value * per_s if metric.reduce == "rate" else value)
            record[name] = None if metric.nullable and not value else value
    if peak_flops:
        record["mfu"] = sum(rank["flops"] for rank in ranks) * per_s / (peak_flops * len(ranks))
    compute_ms = [rank["encoder_ms"] + rank["llm_ms"] + rank["generator_ms"] for rank in ranks]
    if record["pipeline_ms"]:
        record["bubble_fraction"] = 1 - sum(compute_ms) / (record["pipeline_ms"] * len(ranks))
    busy_ms = [rank["data_wait_ms"] + ms for rank, ms in zip(ranks, compute_ms, strict=True)]
    slowest_ms = max(busy_ms)
    record["slowest_rank"] = busy_ms.index(slowest_ms)
    record["straggler_fraction"] = 1.0 - median(busy_ms) / slowest_ms if slowest_ms else 0.0
    record |= extra_metrics
    assert record.keys() == METRICS.keys(), record.keys() - METRICS.keys()
    return record


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory: CUDA memory of torch, or resident memory of a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float | None:
    """Return the peak FLOP/s of one device, or None for a GPU without an entry in `BF16_TFLOPS`.

    On CUDA, this is the dense bfloat16 peak of the data sheet for all dtypes, so that runs are
    comparable. On CPU, it is measured in `dtype` with the threads of this process (about 0.3 s),
    because data sheets of CPUs do not list it.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((t * 1e12 for key, t in BF16_TFLOPS.items() if key in name), None)
    return _measure_matmul_flops(dtype)


def _measure_matmul_flops(dtype: torch.dtype) -> float:
    """Return the best FLOP/s of several square matmuls. bfloat16 is slow on CPUs without support.

    The time is CPU time with all threads busy, so that load by other processes does not reduce the
    peak.
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
