"""Compare a training step on one device with Hugging Face + AdamW and with TRL.

    python benchmarks/single_device.py [--quick] [--json FILE] [--shapes NAME ...]

torchmm runs `Trainer.run_step` of a real recipe, including target counts, the check for non-finite
numbers and metrics. The baselines are in `hf_baseline.py`. Both programs start with the same
weights and use the same samples in the same order. Data loading is not timed.

    equal lengths   samples whose captions have the same number of tokens, so nothing is padded
    real lengths    samples in the original order; baselines pad, torchmm packs
    against TRL     its SFTTrainer, whose loss needs logits of targets only
    compiled        both programs with torch.compile per layer

Tokens are those of samples, without padding. FLOPs for MFU are those of the samples
(`torchmm.costs.flops`) for both programs. On CUDA both use bf16, with and without torch.compile, on
the shapes of published models.
"""

from __future__ import annotations

import argparse
import gc
import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from support.captions import IMAGE_TOKEN, Captions, load_captions
from support.harness import PairedTimes, Row, describe_machine, make_parser, report, time_pairs
from support.models import hf_baseline
from support.models.hf_baseline import PaddedBatch, pad_batch
from support.shapes import SHAPES, Shape

from torchmm.costs.flops import microbatch_flops
from torchmm.data.loader import StepBatch
from torchmm.parallel.mesh import select_device, start_process_group
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    OptimizerConfig,
    TrainingConfig,
)
from torchmm.training.build import build_run
from torchmm.training.metrics import peak_flops
from torchmm.training.model_build import build_meta_model, choose_model_stages
from torchmm.training.shutdown import StopSignal
from torchmm.training.trainer import Trainer

SEED = 0
BASELINES = ("Hugging Face", "TRL")
CPU_SHAPES = ("quickstart", "medium")
CUDA_SHAPES = ("so400m_qwen3_1.7b", "so400m_qwen3_8b_frozen_llm")
FIRST_LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative, on the same weights and samples."""
LAST_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative, after all steps: AdamW turns rounding into steps where gradients are nearly zero."""


@dataclass(frozen=True)
class Case:
    """Comparison of torchmm with a baseline."""

    shape: str
    baseline: str
    equal_lengths: bool
    compiled: bool
    dtype: str
    activation_checkpoint: str
    batches: int
    pairs: int
    mfu_goal: float | None

    @property
    def name(self) -> str:
        parts = [self.shape, "equal lengths" if self.equal_lengths else "real lengths", self.dtype]
        if self.activation_checkpoint != "none":
            parts.append(f"{self.activation_checkpoint} activation checkpointing")
        parts += ["compiled"] * self.compiled
        return ", ".join(parts + ["against TRL"] * (self.baseline == "TRL"))

    @property
    def speed_goal(self) -> float:
        """Goal of the ratio torchmm / baseline."""
        return 1.0 if self.equal_lengths else 1.1


def main() -> int:
    """Run the cases and return 1 if losses differ, else 0."""
    args = _parse()
    device = select_device(args.device)
    captions = load_captions(SEED)
    print(f"machine: {describe_machine(device)}")
    print(f"samples: {captions.source}; seed {SEED}")
    peak = _peak(device)
    if peak is not None:
        print(f"peak for MFU: {peak / 1e12:.4g} TFLOP/s")
    start_process_group(ParallelConfig(), device)
    try:
        rows = []
        for case in _cases(args, device):
            rows += _run_case(case, captions, device, peak)
            _release_memory(device)
    except LossMismatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    report("Training step on one device, baselines Hugging Face + AdamW and TRL", rows, args.json)
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="NAME", help=str([*SHAPES]))
    parser.add_argument("--activation-checkpoint", choices=("none", "selective", "full"))
    parser.add_argument("--pairs", type=int, help="timed pairs per case")
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, default=_installed())
    return parser.parse_args()


def _installed() -> list[str]:
    trl = find_spec("trl") is not None and find_spec("accelerate") is not None
    if not trl:
        print("TRL is not installed and is skipped; run: pip install trl accelerate")
    return [name for name in BASELINES if name != "TRL" or trl]


def _peak(device: torch.device) -> float | None:
    """Return peak FLOP/s. On a CPU, it is the best of ten measurements on a shared host."""
    found = [peak_flops(device) for _ in range(10 if device.type == "cpu" else 1)]
    return max((peak for peak in found if peak is not None), default=None)


def _cases(args: argparse.Namespace, device: torch.device) -> list[Case]:
    cuda = device.type == "cuda"
    on_h200 = cuda and "H200" in torch.cuda.get_device_name(device)
    shapes = args.shapes or (CUDA_SHAPES if cuda else CPU_SHAPES)[: 1 if args.quick else None]
    compiles = cuda or not args.quick
    return [
        Case(
            shape,
            baseline,
            equal_lengths,
            compiled,
            dtype="bfloat16" if cuda else "float32",
            activation_checkpoint=args.activation_checkpoint or SHAPES[shape].activation_checkpoint,
            batches=2 if args.quick else 4,
            pairs=args.pairs or (3 if args.quick else 7),
            mfu_goal=0.5 if on_h200 and compiled else None,
        )
        for shape in shapes
        for equal_lengths in (True, False)
        for compiled in ((False, True) if compiles else (False,))
        for baseline in (args.baselines if not equal_lengths else args.baselines[:1])
        if cuda or not (compiled and equal_lengths)
    ]


class LossMismatchError(Exception):
    """Different losses of torchmm and the baseline."""


def _run_case(
    case: Case, captions: Captions, device: torch.device, peak: float | None
) -> list[Row]:
    if case.equal_lengths:
        captions = captions.of_one_length()
    with (
        tempfile.TemporaryDirectory() as scratch,
        _open_trainer(case, captions, Path(scratch), device) as trainer,
    ):
        parts = trainer.components
        batches = list(islice(parts.loader, case.batches))
        vision = SHAPES[case.shape].vision
        padded = [pad_batch(captions, b.microbatches[0], vision, device) for b in batches]
        baseline = _build_baseline(case, trainer, captions, Path(scratch), device)
        times = _compare(case, trainer, baseline, batches, padded, device)
        flops = _flops(trainer, batches)
    rows = _speed_rows(case, times, batches, flops, peak, device)
    return [*rows, _padding_row(case, batches, padded)]


class Baseline(Protocol):
    """Baseline program of a comparison."""

    def step(self, batch: PaddedBatch) -> float:
        """Run an optimizer step and return the loss before it, in nats per target."""


def _build_baseline(
    case: Case, trainer: Trainer, captions: Captions, scratch: Path, device: torch.device
) -> Baseline:
    recipe, model = trainer.components.run.recipe, trainer.components.model
    if case.baseline == "Hugging Face":
        return hf_baseline.build_baseline(recipe, model, device)
    trl_baseline = import_module("support.models.trl_baseline")
    built: Baseline = trl_baseline.build_baseline(
        recipe, model, captions.tokenizer, device, scratch
    )
    return built


def _release_memory(device: torch.device) -> None:
    """Free the models of a case, which are in reference cycles of hooks and compiled code."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _open_trainer(
    case: Case, captions: Captions, scratch: Path, device: torch.device
) -> Iterator[Trainer]:
    run = resolve_recipe(_recipe(case, captions, scratch, device), 1)
    with StopSignal() as stop, redirect_stdout(io.StringIO()):  # the run's own start table
        model, tokenizer = build_meta_model(run)
        cut = choose_model_stages(run, model, tokenizer, device)
        trainer = Trainer(build_run(run, scratch, device, model, tokenizer, cut), stop)
    with closing(trainer):
        yield trainer


def _recipe(case: Case, captions: Captions, scratch: Path, device: torch.device) -> Recipe:
    """Return the recipe of a case, and write its samples and tokenizer to `scratch`."""
    shape = SHAPES[case.shape]
    captions.write_parquet(scratch / "captions.parquet")
    captions.tokenizer.save_pretrained(scratch / "tokenizer")
    sequence_length, sequences = _step_size(case, shape, captions)
    return Recipe(
        name=case.shape,
        model=ModelConfig(
            config=shape.llava_config(captions.tokenizer.get_vocab()[IMAGE_TOKEN]),
            tokenizer=str(scratch / "tokenizer"),
        ),
        freeze=FreezeConfig(modules=list(shape.frozen)),
        data=DataConfig(
            sources=[SourceConfig(path=str(scratch / "captions.parquet"), name="captions")],
            workers=0,
            index_cache_dir=str(scratch / "index"),
        ),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0, lr_schedule="constant"),
        training=TrainingConfig(
            steps=10**6,
            global_batch_size=sequences,
            microbatch_size=sequences,
            sequence_length=sequence_length,
            seed=SEED,
            dtype=case.dtype,
            device=device.type,
        ),
        checkpoint=CheckpointConfig(resume="none"),
        activation_checkpoint=ActivationCheckpointConfig(mode=case.activation_checkpoint),
        compile=CompileConfig(enabled=case.compiled),
    )


def _step_size(case: Case, shape: Shape, captions: Captions) -> tuple[int, int]:
    """Return tokens per packed sequence and the number of packed sequences.

    Samples of equal length are not packed.
    """
    if not case.equal_lengths:
        return shape.sequence_length, shape.sequences
    text = captions.tokenizer(captions.records[0]["text"]).input_ids
    image_tokens = (shape.vision["image_size"] // shape.vision["patch_size"]) ** 2
    length = image_tokens + len(text) + 2  # begin and end
    return length, shape.sequence_length * shape.sequences // length


def _compare(
    case: Case,
    trainer: Trainer,
    baseline: Baseline,
    batches: list[StepBatch],
    padded: list[PaddedBatch],
    device: torch.device,
) -> PairedTimes:
    """Time torchmm and the baseline on all batches, after a check of equal losses."""
    last: dict[str, float] = {}

    def run_ours() -> None:
        for batch in batches:
            last["ours"] = trainer.run_step(iter([batch])).record["loss"]

    def run_baseline() -> None:
        for batch in padded:
            last["baseline"] = baseline.step(batch)

    first = trainer.run_step(iter(batches)).record["loss"], baseline.step(padded[0])
    _check_losses(f"{case.name}: first loss", *first, FIRST_LOSS_TOLERANCE[case.dtype])
    run_ours()
    run_baseline()
    times = time_pairs(run_ours, run_baseline, case.pairs, device)
    what = f"{case.name}: loss after {trainer.step} steps"
    _check_losses(what, last["ours"], last["baseline"], LAST_LOSS_TOLERANCE[case.dtype])
    return times


def _check_losses(what: str, ours: float, baseline: float, tolerance: float) -> None:
    difference = abs(ours - baseline) / abs(baseline)
    text = (
        f"{what}: torchmm {ours:.6f}, baseline {baseline:.6f}, relative difference {difference:.1e}"
    )
    if not difference <= tolerance:
        raise LossMismatchError(f"{text}, more than {tolerance:.0e}")
    print(text)


def _flops(trainer: Trainer, batches: list[StepBatch]) -> int:
    """Return the FLOPs of all batches, forward and backward."""
    modules = [m.describe() for m in trainer.components.model.modality_modules()]
    counts = [
        microbatch_flops(modules, microbatch.meta, microbatch.target_count)
        for batch in batches
        for microbatch in batch.microbatches
    ]
    return sum(f.forward + f.backward for by_name in counts for f in by_name.values())


def _speed_rows(
    case: Case,
    times: PairedTimes,
    batches: list[StepBatch],
    flops: int,
    peak: float | None,
    device: torch.device,
) -> list[Row]:
    tokens = _used_tokens(batches)
    torchmm_s, baseline_s = times.median_ours_s, times.median_baseline_s
    goal = case.speed_goal
    rows = [
        Row(case.name, "throughput", "tokens/s", tokens / torchmm_s, tokens / baseline_s),
        Row(case.name, "speedup", "x", times.speed_ratio, baseline=1.0, goal=goal),
    ]
    if device.type == "cpu":
        ratio = times.cpu_ratio
        rows.append(Row(case.name, "CPU time ratio", "x", ratio, baseline=1.0, goal=goal))
    if peak is not None:
        ours, baseline = flops / torchmm_s / peak, flops / baseline_s / peak
        rows.append(Row(case.name, "MFU", "fraction", ours, baseline, goal=case.mfu_goal))
    return rows


def _padding_row(case: Case, batches: list[StepBatch], padded: list[PaddedBatch]) -> Row:
    """Return the row of the fraction of computed positions that are padding."""
    used = _used_tokens(batches)
    ours = 1 - used / sum(m.meta.tokens for b in batches for m in b.microbatches)
    baseline = 1 - used / sum(p["labels"].numel() for p in padded)
    return Row(case.name, "padding", "fraction", ours, baseline, better="lower")


def _used_tokens(batches: list[StepBatch]) -> int:
    return sum(m.meta.used_tokens for b in batches for m in b.microbatches)


if __name__ == "__main__":
    sys.exit(main())
