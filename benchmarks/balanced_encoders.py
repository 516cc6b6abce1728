"""Compare balanced data with regular FSDP2 and with pipelines that have searched schedules.

    python benchmarks/balanced_encoders.py [--quick] [--json FILE] [--cases NAME ...]
    python benchmarks/balanced_encoders.py --plot docs/images/balanced_encoders.svg

    vlm_s, vlm_s_tail, vlm_m_tail, qwen3_vl_8b, video, alike
             simulated arms on many batches (data: `support/cases/balance_streams.py`)
    sleep    FSDP2 and pipelines on eight sleeping ranks (`support/cases/balance_sleeping.py`)
    images   regular and balanced FSDP2 on ranks that sleep or compute
    host     CPU time of the assignment of images for 1,024 ranks

Arms without a pipeline are FSDP2, "reordered" (`data.reorder` = "intra"), "balanced images"
(`data.balance` = "images") and "balanced packing" (`data.packing` = "balanced"). Pipelines have
static 1F1B, separated modules with a static rule, or searched schedules. They run on the original
sequences, and on those of balanced packing with `data.reorder` = "both".

In "images", FSDP2 ranks synchronize in every layer, so the slowest encoder determines the time of a
microbatch. Layers of a small model sleep for as long as they would compute, with 0.7 of the work in
the encoder as in VLM-S. Processes, FSDP2 and messages over gloo are real. "lockstep CPU" is the CPU
time of the slowest computing rank, summed over microbatches, which other programs do not change.
Programs alternate on each step. Ratios are medians of runs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from documents import Sample
from loader_scale import PACKS, cpu_s, fabricate, sample_count, steps_of
from support.balanced_microbatches import balanced_microbatch
from support.cases import balance_sleeping
from support.cases.balance_arms import (
    EVEN,
    IMAGES,
    PLAIN,
    Arm,
    ArmChoice,
    BatchCounts,
    BatchSample,
    Setup,
    balanced_arm,
    choose_arms,
    paired_speed,
    run_arm,
)
from support.cases.balance_streams import CASES as STREAMS
from support.cases.balance_streams import SEED, Case, draw_batches
from support.cases.lockstep_picture import draw_lockstep
from support.harness import Row, run_cases
from support.models.pipeline_model import IMAGE_TOKENS, Size, make_microbatch
from support.ranks import Comparison, Stopwatch, run_ranks
from torch import Tensor, nn

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.image_balancing import ImageBalancer
from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.common.batch import ImageSizes, Microbatch, MicrobatchMeta
from torchmm.data.steps.background_steps import BackgroundSteps
from torchmm.data.steps.image_balance import ImageBalancedSteps, balance_images
from torchmm.data.steps.plan_steps import StepPosition
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.apply import parallelize
from torchmm.parallel.exchange import data_parallel_feature_exchange
from torchmm.parallel.mesh import build_mesh
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.step import plan_layout
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline

RECIPE = Path(__file__).parents[1] / "recipes" / "papers" / "pipeweaver_vlm_s.toml"
SHORTEN = 4
"""Image counts are divided by this."""
TOKENS = 48 // SHORTEN * IMAGE_TOKENS + 64
ENCODER_SHARE = 0.7
"""Of the work of VLM-S."""
MANY_RANKS = 1024
QUIET = 0.3
SIMULATED = {
    "full": BatchCounts(200, 40, 20, 4),
    "quick": BatchCounts(3, 0, 0, 0),
    "tiny": BatchCounts(1, 0, 0, 0),
}
"""Numbers of simulated batches. A searched schedule takes about 10 s of CPU time."""


@dataclass(frozen=True)
class Setting:
    """Sizes and durations of the measurements.

    Attributes:
        worlds: Numbers of sleeping ranks.
        image_layer_s: Sleep of an encoder layer in the forward pass of an image; twice in backward.
    """

    worlds: tuple[int, ...]
    microbatches: int
    steps: int
    runs: int
    image_layer_s: float
    sleeping: Size
    computing: Size
    patience_s: float


FULL = Setting((2, 4, 8), 8, 4, 5, 4e-3, Size(4, 4, 32, 32), Size(4, 4, 96, 96), 600)
QUICK = Setting((2,), 4, 1, 2, 6e-3, Size(2, 2, 32, 32), Size(2, 2, 64, 64), 0)


def image_counts(steps: int, microbatches: int, ranks: int) -> np.ndarray:
    """Return random image counts as in the recipe, of shape (steps, microbatches, ranks)."""
    shape = (steps, microbatches, ranks)
    metas = sample_vlm_s(int(np.prod(shape)))
    return np.array([meta.image_count // SHORTEN for meta in metas]).reshape(shape)


def sample_vlm_s(count: int) -> list[MicrobatchMeta]:
    """Return `count` random sequences of VLM-S."""
    recipe = load_recipe(RECIPE).recipe
    return sample_microbatches(
        recipe.simulation,
        count,
        sequence_length=recipe.training.sequence_length,
        microbatch_size=1,
        first=0,
    )


class _Sleep(torch.autograd.Function):
    """Autograd function that sleeps in the forward pass and twice as long in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()  # FSDP2 warns about views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def put_to_sleep(model: MultimodalModel, images: float, image_layer_s: float) -> None:
    """Replace the computation of all layers by sleep.

    Args:
        images: Mean number of images of a microbatch.
    """
    vision, llm = model.modality_modules()
    mean_s = images * image_layer_s * len(vision.layers)
    llm_s = mean_s * (1 - ENCODER_SHARE) / ENCODER_SHARE / len(llm.layers)

    def sleep(layer: nn.Module, image_s: float, fixed_s: float) -> None:
        def after(module: nn.Module, inputs: Any, output: Any) -> Any:
            hidden = output if isinstance(output, Tensor) else output[0]
            slept = _Sleep.apply(hidden, fixed_s + image_s * hidden.shape[0])
            return slept if isinstance(output, Tensor) else (slept, *output[1:])

        layer.register_forward_hook(after)

    for layer in vision.layers:
        sleep(layer, image_layer_s, 0.0)
    for layer in llm.layers:
        sleep(layer, 0.0, llm_s)


class Steps:
    """Program that runs the steps of one rank, with or without balanced images."""

    def __init__(self, name: str, pipeline: Pipeline, steps: Sequence[Sequence[Microbatch]]):
        self.name, self.pipeline, self.steps = name, pipeline, steps

    def step(self, index: int) -> float:
        """Run a step and return its compute or sleep seconds, including waits in layers."""
        return self._run(self.steps[index])

    def _run(self, microbatches: Sequence[Microbatch]) -> float:
        result = self.pipeline.run(self.pipeline.plan_training(microbatches), microbatches)
        done = (r for r in result.records or () if r.action.type in COMPUTE)
        return sum(r.end_ms - r.start_ms for r in done) / 1e3

    def lockstep_cpu_s(self) -> float:
        """Return the CPU time of the slowest rank, summed over all microbatches."""
        own = []
        for microbatch in (m for step in self.steps for m in step):
            begin_s = time.process_time()
            self._run([microbatch])
            own.append(time.process_time() - begin_s)
        slowest = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.sum())


class Traffic(NamedTuple):
    """Message sizes of a rank per step, as means over ranks and steps."""

    exchanges: float
    feature_bytes: float
    parameter_bytes: float
    """Gathered in forward and backward, and gradients reduced, by FSDP2."""


class Found(NamedTuple):
    """Results of one world."""

    comparison: Comparison
    lockstep_cpu_s: dict[str, float]
    traffic: Traffic


def run(setting: Setting, computing: bool) -> Found:
    """Measure one rank and return the results of its world."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    counts = image_counts(setting.steps, setting.microbatches, ranks)
    size = setting.computing if computing else setting.sleeping
    model = size.build()
    if not computing:
        put_to_sleep(model, float(counts.mean()), setting.image_layer_s)
    config = ParallelConfig(shard=ranks)
    mesh = build_mesh(config, torch.device("cpu"))
    modules = [module.describe() for module in model.modality_modules()]
    every = [
        [make_microbatch([Sample(int(n), TOKENS)], i, TOKENS) for i, n in enumerate(row)]
        for row in counts.reshape(-1, ranks)
    ]
    layout = plan_layout(config, modules, [m.meta for row in every for m in row])
    stages = split_model_for_rank(model, layout, 0)
    parameters = sum(p.numel() for p in model.parameters())
    recompute, compiles = ActivationCheckpointConfig(), CompileConfig(enabled=False)
    parallelize(model, mesh, config, recompute, compiles, torch.float32)
    exchange = data_parallel_feature_exchange(mesh)
    pipelines = [
        Pipeline(model, stages, layout, modules, config, mesh, torch.float32, ranks_of_features)
        for ranks_of_features in (None, exchange)
    ]
    balance = ImageBalancer(tuple(module for module in modules if module.kind == "encoder"))
    plain = [row[rank] for row in every]
    balanced = [balanced_microbatch(row, balance, rank) for row in every]
    programs = [
        Steps(name, pipeline, _in_steps(own, setting.microbatches))
        for name, pipeline, own in zip(
            ("plain", "balanced"), pipelines, (plain, balanced), strict=True
        )
    ]
    watch = Stopwatch(setting.patience_s, QUIET)
    comparison = watch.compare(programs, setting.steps, setting.runs)
    cpu_s = {p.name: p.lockstep_cpu_s() for p in programs} if computing else {}
    sent = sum(
        sum(tokens for home, tokens in _sent(microbatch) if home != rank) for microbatch in balanced
    )
    width = model.llm.text_config.hidden_size
    total = torch.tensor(2.0 * 4 * sent * width)
    dist.all_reduce(total)
    traffic = Traffic(
        2.0 * setting.microbatches,
        float(total) / ranks / setting.steps,
        3.0 * 4 * parameters * (ranks - 1) / ranks * setting.microbatches,
    )
    return Found(comparison, cpu_s, traffic)


def _in_steps(microbatches: Sequence[Microbatch], count: int) -> list[list[Microbatch]]:
    return [list(microbatches[i : i + count]) for i in range(0, len(microbatches), count)]


def _sent(microbatch: Any) -> list[tuple[int, int]]:
    """Return the destination rank and the token count of each image."""
    images = microbatch.task_meta.images_of_encoder("vision")
    homes = microbatch.image_sources["vision"]
    return [(home, image.tokens) for home, image in zip(homes, images, strict=True)]


def rows_of(case: str, found: Found) -> list[Row]:
    """Return the rows of one world size."""
    times = found.comparison
    rows = [
        Row(case, "speedup", "x", times.speed_ratio("balanced", "plain"), 1.0, goal=1.3),
        Row(
            case, "step time", "s", times.wall_s("balanced"), times.wall_s("plain"), better="lower"
        ),
    ]
    if found.lockstep_cpu_s:
        ours, plain = (found.lockstep_cpu_s[name] for name in ("balanced", "plain"))
        rows.append(Row(case, "lockstep CPU", "s", ours, plain, better="lower"))
    traffic = found.traffic
    rows += [
        Row(case, "feature exchanges of a step", "messages", traffic.exchanges, 0.0),
        Row(case, "features and gradients sent by a rank in a step", "MB",
            traffic.feature_bytes / 1e6, 0.0, better="lower"),
        Row(case, "parameters and gradients of FSDP2", "MB", traffic.parameter_bytes / 1e6,
            traffic.parameter_bytes / 1e6, better="lower"),
    ]  # fmt: skip
    return rows


def balanced_steps(
    directories: Sequence[Path], balance: ImageBalancer, position: StepPosition
) -> ImageBalancedSteps:
    """Return the balanced steps of `MANY_RANKS` after a position."""
    return ImageBalancedSteps(
        steps_of(directories, MANY_RANKS, MANY_RANKS, position.state), balance
    )


def host_rows(steps: int) -> list[Row]:
    """Return CPU time of the assignment and work of the slowest rank for `MANY_RANKS`."""
    vision, _ = (module.describe() for module in Size(2, 2, 32, 32).build().modality_modules())
    balance = ImageBalancer((vision,))
    assigned_s, foreground_s = [], []
    with tempfile.TemporaryDirectory() as scratch:
        directories = [Path(scratch) / str(number) for number in range(3)]
        for directory in directories:
            fabricate(directory, 1 << 22)
        planned = steps_of(directories, MANY_RANKS, MANY_RANKS)
        balance_images(next(planned), balance)  # The costs of image sizes are computed once.
        for _ in range(steps):
            step = next(planned)
            assigned_s.append(cpu_s(lambda step=step: balance_images(step, balance))[0])
        beside = BackgroundSteps(
            partial(balanced_steps, directories, balance), StepPosition(7, MANY_RANKS)
        )
        for number in range(steps + 4):  # The process starts after two steps.
            used_s, _ = cpu_s(lambda: (time.sleep(0.2), next(beside)))
            foreground_s += [used_s] * (number >= 4)
        beside.close()
    case = f"{MANY_RANKS} ranks, {PACKS} microbatches, {sample_count(step)} images"
    rows = [
        Row(case, name, "ms CPU", 1e3 * min(found), goal=goal, better="lower")
        for name, found, goal in (
            ("assignment of a step, in the background", assigned_s, None),
            ("assignment of a step, in the foreground", foreground_s, 5.0),
        )
    ]
    metas = sample_vlm_s(MANY_RANKS)
    sizes_I4 = ImageSizes.from_samples(
        [s for meta in metas for s in meta.samples], balance.names
    ).sizes_I4
    home_I = np.repeat(np.arange(MANY_RANKS), [meta.image_count for meta in metas])
    used_s, owners = min(
        (cpu_s(lambda: balance.owners(sizes_I4, home_I, MANY_RANKS)) for _ in range(1 + steps)),
        key=lambda found: found[0],
    )
    case = f"{MANY_RANKS} ranks, VLM-S, {len(home_I)} images"
    rows.append(Row(case, "assignment of a microbatch", "ms CPU", 1e3 * used_s, better="lower"))
    cost_I = balance.costs(vision, sizes_I4[:, 1:])
    work, natural = (np.bincount(of, cost_I, MANY_RANKS) for of in (owners.owners_I, home_I))
    slowest = [float(each.max() / each.mean()) for each in (work, natural)]
    rows.append(Row(case, "work of the slowest rank / mean", "x", *slowest, better="lower"))
    return rows


def run_simulated(case: Case, size: str) -> Iterator[list[Row]]:
    """Simulate plain FSDP2, balanced data and pipelines on many batches of a case.

    Short runs have the first case only.
    """
    if size != "full" and case != STREAMS[0]:
        return
    counts = SIMULATED[size]
    if case.images is not None:  # only the comparison without a pipeline
        counts = BatchCounts(counts.plain, 0, 0, 0)
    recipe = case.recipe()
    model = recipe_model(recipe)
    profile = load_profile(recipe.simulation.device)
    arms: dict[str, Arm] = {}
    choices: list[ArmChoice] = []
    for is_even in (False, True) if case.images is None else (False,):
        packed = draw_batches(case, recipe, max(counts), is_even)
        batches = [BatchSample(recipe, model, packs) for packs in packed.batches]
        setup = Setup(recipe, case.workload.gpus, profile, batches)
        balanced = filter(None, map(balanced_arm, choices))
        for choice in balanced if is_even else choose_arms(setup, counts):
            arm = run_arm(setup, choice, 1e3 * packed.seconds)
            choices += [] if is_even else [choice]
            arms[arm.name] = arm
            yield arm_rows(case.name, arm, arms)


def arm_rows(case: str, arm: Arm, arms: Mapping[str, Arm]) -> list[Row]:
    """Return the rows of an arm.

    Ratios are those of the batches that both arms have.

    Args:
        arms: All arms so far; the baseline is plain FSDP2.
    """
    print(f"{case}, {arm.name}: {arm.sizes}")
    case, plain = f"{case}: {arm.name}", arms[PLAIN]
    ratios = [
        Row(case, f"tokens per second / {name}", "x", paired_speed(arm, arms[name]), 1.0,
            kind="simulated")
        for name in (PLAIN, IMAGES + EVEN if arm.name.endswith(EVEN) else IMAGES)
        if name in arms
    ]  # fmt: skip
    return [
        *ratios,
        Row(case, "step, mean", "s", arm.mean_s, plain.mean_s, better="lower", kind="simulated"),
        Row(case, "step, 95th percentile", "s", arm.late_s, plain.late_s, better="lower",
            kind="simulated"),
        Row(case, "planning per step, CPU", "ms", arm.planning_ms, plain.planning_ms,
            better="lower"),
        Row(case, "batches", "", len(arm.steps_s), kind="simulated"),
        Row(case, "batches that do not fit", "", arm.too_large, better="lower", kind="simulated"),
    ]  # fmt: skip


def run_sleep(size: str) -> Iterator[list[Row]]:
    """Measure FSDP2 and pipelines with eight sleeping ranks."""
    for case in STREAMS[: 2 if size == "full" else 1]:
        yield balance_sleeping.run(case, size)


def run_images(size: str) -> Iterator[list[Row]]:
    """Measure plain and balanced FSDP2 with sleeping and with computing ranks."""
    setting = FULL if size == "full" else QUICK
    cases = {f"{ranks} sleeping ranks": (ranks, False) for ranks in setting.worlds}
    cases |= {f"{ranks} computing ranks": (ranks, True) for ranks in setting.worlds if ranks <= 4}
    for case, (ranks, computing) in cases.items():
        found = run_ranks(run, ranks, setting, computing)
        print(f"{case}: {found.comparison}")
        yield rows_of(case, found)


def run_host(size: str) -> Iterator[list[Row]]:
    """Measure the assignment of images for many ranks."""
    yield host_rows(8 if size == "full" else 2)


CASES = {
    **{case.key: partial(run_simulated, case) for case in STREAMS},
    "sleep": run_sleep,
    "images": run_images,
    "host": run_host,
}


def main() -> None:
    """Run the cases, or plot the figure of the documentation."""
    if sys.argv[1:2] == ["--picture"]:
        sys.exit("--picture was renamed to --plot")
    if sys.argv[1:2] == ["--plot"]:
        print("steps in ms:", *(f"{ms:,.0f}" for ms in draw_lockstep(Path(sys.argv[2]))))
        return
    run_cases("Balanced data", __doc__, CASES, f"seed {SEED}")


if __name__ == "__main__":
    main()
