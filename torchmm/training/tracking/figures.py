"""The table of metrics: every key of metrics.jsonl with its group, unit, text and reduction.

    StepRecord          one line of metrics.jsonl; field names are the keys
    FIGURES["step_ms"]  Figure(group="time", unit="ms", meaning="The whole step, ...", reduce="max")
    "time/step_ms"      the same metric in trackers, whose panels are grouped by the text before "/"

To add a metric that each rank measures, add a field with `reduce` to `StepRecord` and a field with
the same name to `RankStep` (`torchmm.training.metrics`), and set it in `StepMeter`. metrics.jsonl,
trackers and the reference page then have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

Group = Literal[
    "train", "validation", "time", "memory", "pipeline", "balance", "data", "planner", "checkpoint"
]


Record = Mapping[str, Any]
"""A `StepRecord` as metrics.jsonl has it."""


class Figure(NamedTuple):
    """Definition of a metric, the annotation of a field of `StepRecord`."""

    group: Group
    """Group of panels in trackers."""
    unit: str
    """Unit, or "" for plain numbers and text."""
    meaning: str
    """Documentation: one or two sentences."""
    reduce: Literal["max", "sum"] | None = None
    """Reduction over ranks of the field of `RankStep` that has the same name.

    If the type of the metric includes None, it is None if the result is 0. If `reduce` is None, the
    metric is computed in other ways.
    """


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl. None where not applicable."""

    step: Annotated[int, Figure("train", "", "Number of the optimizer step, from 1.")]
    epoch: Annotated[
        float,
        Figure(
            "data",
            "",
            "Passes over the training samples after the step: samples trained on, divided by the "
            "usable samples of the source, for the source with the fewest passes. Streams count as "
            "0 during the first pass, in which their length is unknown.",
        ),
    ]
    loss: Annotated[
        float,
        Figure(
            "train",
            "nats",
            "Mean loss per target token of the global batch; with a generator: the weighted sum of "
            "`loss_text`, which is that, and `loss_image`.",
        ),
    ]
    validation_loss: Annotated[
        float | None,
        Figure(
            "validation",
            "nats",
            "`loss` on held-out samples, for steps after which it was measured.",
        ),
    ]
    grad_norm: Annotated[
        float, Figure("train", "", "Global norm of all gradients, before it is clipped.")
    ]
    lr: Annotated[float, Figure("train", "", "Learning rate of the step (`optimizer.lr`).")]
    tokens_per_s: Annotated[
        float, Figure("time", "1/s", "Tokens of all ranks together, padding not counted.")
    ]
    samples_per_s: Annotated[float, Figure("time", "1/s", "Samples of all ranks together.")]
    images_per_s: Annotated[
        float,
        Figure("time", "1/s", "Images, sounds and clips that encoders read, of all ranks."),
    ]
    mfu: Annotated[
        float | None,
        Figure(
            "time",
            "0..1",
            "Model FLOPs, including encoders, divided by step time and peak FLOP/s of all devices; "
            "null if the peak is unknown. CPU runs measure their peak at each start, so compare "
            "tokens_per_s instead.",
        ),
    ]
    step_ms: Annotated[
        float, Figure("time", "ms", "The whole step, on the slowest rank.", reduce="max")
    ]
    data_wait_ms: Annotated[
        float,
        Figure(
            "time",
            "ms",
            "Time the rank that waited longest waited for data.",
            reduce="max",
        ),
    ]
    encoder_ms: Annotated[
        float | None,
        Figure(
            "time",
            "ms",
            "Forwards and backwards of all encoders, on the slowest rank.",
            reduce="max",
        ),
    ]
    llm_ms: Annotated[
        float | None,
        Figure(
            "time", "ms", "Forwards and backwards of the LLM, on the slowest rank.", reduce="max"
        ),
    ]
    pipeline_ms: Annotated[
        float | None,
        Figure(
            "pipeline",
            "ms",
            "From the first to the last action of the step's plan, on the slowest rank; none "
            "without a pipeline.",
            reduce="max",
        ),
    ]
    bubble_fraction: Annotated[
        float | None,
        Figure(
            "pipeline",
            "0..1",
            "Share of the ranks' time between the plan's first and last action in which they "
            "neither computed forwards nor backwards; none without a pipeline.",
        ),
    ]
    peak_memory_bytes: Annotated[
        int,
        Figure(
            "memory",
            "bytes",
            "Highest use of one rank since its start: device memory on CUDA, the process's memory "
            "on a CPU.",
            reduce="max",
        ),
    ]
    slowest_rank: Annotated[
        int,
        Figure(
            "pipeline",
            "",
            "Rank with the most time in data wait and in modules. Collectives inside a phase make "
            "fast ranks wait there too, so it points to slow readers better than to slow devices.",
        ),
    ]
    straggler_share: Annotated[
        float,
        Figure(
            "pipeline",
            "0..1",
            "Share of that rank's time which the median rank did not need; 0: they are equally "
            "fast.",
        ),
    ]
    skipped_samples: Annotated[
        int,
        Figure("data", "", "Corrupt samples that were skipped since the run began.", reduce="sum"),
    ]
    graphs: Annotated[
        int,
        Figure(
            "time", "", "Graphs of layers that the busiest rank compiled in the step.", reduce="max"
        ),
    ]
    compile_ms: Annotated[
        float | None,
        Figure(
            "time",
            "ms",
            "Compile time of the slowest rank; null if no graph was compiled.",
            reduce="max",
        ),
    ]
    decoded_images: Annotated[
        int,
        Figure(
            "data",
            "",
            "Images, sounds and clips (or their frames), by encoder that reads them, and drawings, "
            "that all ranks together decoded for the step: as many as its samples have, but those "
            "of corrupt ones.",
            reduce="sum",
        ),
    ]
    read_bytes: Annotated[
        int,
        Figure(
            "data",
            "bytes",
            "Of records and files, by all ranks together. Every rank reads the records of its "
            "samples, with the files that are in them, but other files only to decode them; a "
            "character of text counts as a byte.",
            reduce="sum",
        ),
    ]
    loss_text: Annotated[
        float | None,
        Figure("train", "nats", "With a generator: mean loss per target token of the text."),
    ] = None
    loss_image: Annotated[
        float | None,
        Figure(
            "train",
            "",
            "With a generator: mean over images of the squared error of the velocity, mean over "
            "pixels.",
        ),
    ] = None
    validation_loss_text: Annotated[
        float | None, Figure("validation", "nats", "`loss_text` on held-out samples.")
    ] = None
    validation_loss_image: Annotated[
        float | None, Figure("validation", "", "`loss_image` on held-out samples.")
    ] = None
    generator_ms: Annotated[
        float | None,
        Figure(
            "time",
            "ms",
            "Forwards and backwards of the generator, on the slowest rank.",
            reduce="max",
        ),
    ] = None
    generated_per_s: Annotated[
        float | None,
        Figure("time", "1/s", "Images and clips that the generator draws, of all ranks."),
    ] = None
    expert_load: Annotated[
        float | None,
        Figure(
            "train",
            "",
            "Tokens of the busiest expert over the mean of its layer's experts, in this step over "
            "all ranks, on average over layers: 1 at best, the number of experts at worst. None "
            "without experts, and where their layers are compiled.",
        ),
    ] = None
    predicted_ms: Annotated[
        float | None,
        Figure(
            "planner",
            "ms",
            "With a schedule that is planned beside training, in the first pipeline: what forwards "
            "and backwards of the step were to take, from measured times of earlier steps; of "
            "Optimus, the whole plan. What they took, in the slowest pipeline: `pipeline_ms`.",
        ),
    ] = None
    planner: Annotated[
        str | None,
        Figure(
            "planner",
            "",
            'What the step\'s order comes from: "search", "natural", or the static planner that '
            'was as good; "optimus coarse", "optimus fine", "optimus launched".',
        ),
    ] = None
    planner_ms: Annotated[
        float | None,
        Figure(
            "planner",
            "ms",
            "Time in which the step was planned, with the search for its order, during training "
            "or before the step.",
        ),
    ] = None
    planner_evaluations: Annotated[int | None, Figure("planner", "", "Orders that were tried.")] = (
        None
    )
    gain_over_natural: Annotated[
        float | None,
        Figure(
            "planner",
            "share",
            "How much longer the natural order, or Optimus' best coarse one, was to take.",
        ),
    ] = None
    image_imbalance: Annotated[
        float | None,
        Figure(
            "balance",
            "",
            "With balanced images: encoder and generator work of the slowest rank in each "
            "microbatch over that of the mean rank, computed from image sizes. 1 means equal work. "
            "None if images are not balanced.",
        ),
    ] = None
    image_imbalance_before: Annotated[
        float | None,
        Figure(
            "balance", "", "`image_imbalance` if each rank read the images of its own sequences."
        ),
    ] = None
    sequence_imbalance: Annotated[
        float | None,
        Figure(
            "balance",
            "",
            "With `data.reorder`: predicted time of the slowest rank over that of the mean rank. "
            "Ranks that synchronize in every layer are compared in each microbatch, other ranks in "
            "each step. With balanced images, encoders are excluded. 1 means equal work. None "
            "without reordering.",
        ),
    ] = None
    sequence_imbalance_before: Annotated[
        float | None,
        Figure("balance", "", "`sequence_imbalance` of the sequences in their original order."),
    ] = None
    save_wait_ms: Annotated[
        float | None,
        Figure(
            "checkpoint",
            "ms",
            "How long training stood still for a checkpoint; this and the next four on rank 0, of "
            "what came to an end since the record before.",
        ),
    ] = None
    save_ms: Annotated[
        float | None, Figure("checkpoint", "ms", "From there until the checkpoint was committed.")
    ] = None
    save_bytes: Annotated[int | None, Figure("checkpoint", "bytes", "Size of the checkpoint.")] = (
        None
    )
    upload_ms: Annotated[
        float | None,
        Figure(
            "checkpoint", "ms", "How long all ranks copied a checkpoint to `checkpoint.upload`."
        ),
    ] = None
    upload_bytes: Annotated[
        int | None, Figure("checkpoint", "bytes", "Size of what was copied.")
    ] = None
    failed_uploads: Annotated[
        int | None,
        Figure(
            "checkpoint",
            "",
            "Checkpoints that could not be copied, since this start; none: none failed.",
        ),
    ] = None
    word_error_rate: Annotated[
        float | None,
        Figure(
            "validation",
            "share",
            "Word errors in what was generated from held-out sounds or clips, per word that was "
            "said.",
        ),
    ] = None
    filtered_samples: Annotated[
        int | None,
        Figure(
            "data",
            "",
            "Samples of streams that were not used because of `filter` or a limit, since the run "
            "began. None without streams: the counts of other sources are logged at the start.",
        ),
    ] = None
    truncated_samples: Annotated[
        int | None,
        Figure(
            "data",
            "",
            "Samples of streams of which text, images or video frames were dropped, by type of the "
            "content, since the run began. None without streams.",
        ),
    ] = None
    scores: Annotated[
        dict[str, float] | None,
        Figure(
            "validation",
            "",
            "Scores of what was generated for held-out sources that say how it is judged, by "
            '"SOURCE/SCORE"; those of benchmarks ("TASK/METRIC"), of earlier snapshots too, in the '
            "step that they were ready in, at the latest in the last one.",
        ),
    ] = None

    def figure(self, name: str) -> float | None:
        """By its name in metrics.jsonl, or that of a score."""
        return (self.scores or {}).get(name, getattr(self, name, None))


def _annotations() -> dict[str, tuple[Any, Figure]]:
    """Return type and definition of each metric."""
    hints = get_type_hints(StepRecord, include_extras=True)
    return {name: get_args(hint) for name, hint in hints.items()}


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {name: figure for name, (_, figure) in _annotations().items()}
)
"""Definitions by key of metrics.jsonl, in the order of its lines."""
REDUCED: Mapping[str, Figure] = MappingProxyType(
    {name: figure for name, figure in FIGURES.items() if figure.reduce}
)
"""Metrics that are reduced over ranks."""
_NULLABLE = {name for name, (kind, _) in _annotations().items() if type(None) in get_args(kind)}


def reduce_over_ranks(ranks: Sequence[Any]) -> dict[str, Any]:
    """Return the metrics of `REDUCED` over all ranks.

    Args:
        ranks: `RankStep` of each rank.
    """
    found = {}
    for name, figure in REDUCED.items():
        values = [getattr(rank, name) for rank in ranks]
        value = max(values) if figure.reduce == "max" else sum(values)
        found[name] = None if name in _NULLABLE and not value else value
    return found


def grouped(record: Record) -> dict[str, Any]:
    """Numbers of a record by their names in trackers, "GROUP/KEY"; what is None is left out, the
    step is told apart, and scores are "validation/SOURCE/SCORE"."""
    shown: dict[str, Any] = {}
    for key, value in record.items():
        if key == "step" or value is None or isinstance(value, str):
            continue
        group = FIGURES[key].group
        values = value if isinstance(value, Mapping) else {key: value}
        shown |= {f"{group}/{name}": number for name, number in values.items()}
    return shown
