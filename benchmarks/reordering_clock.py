"""Measure reordering: the same global batches in default order, balanced, ordered, and both.

Real documents determine the images of every microbatch. Four sleeping ranks are two pipelines of an
encoder rank and an LLM rank. Their layers sleep for as long as they would compute. Processes,
messages over gloo and the runtime are real. Two computing ranks are data-parallel replicas of a
small image-text model with a gradient all-reduce at the end. In the third case, four FSDP2 shards
with sleeping layers synchronize in every layer. Programs alternate on each step. Times are until
the last rank is done, medians of paired runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from documents import load_documents, pack_documents
from numpy.typing import NDArray
from support.harness import Row, describe_machine, make_parser, report
from support.models.pipeline_model import Size, make_microbatch
from support.ranks import Comparison, Stopwatch, run_ranks
from support.sleepers import WIDTH, ShardedSleeper, SleepStage, SleepWork, message_rows

from torchmm.balance.disttrain.reordering.compiled_schedule import compile_schedule
from torchmm.balance.disttrain.reordering.group_balancing import balance_groups
from torchmm.balance.disttrain.reordering.lockstep_slices import slice_microbatches
from torchmm.balance.disttrain.reordering.microbatch_order import reorder_microbatches
from torchmm.balance.image_balancing import assign_images
from torchmm.common.batch import Microbatch
from torchmm.costs.flops import microbatch_flops
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.exchange import ExchangeCounts
from torchmm.parallel.mesh import ParallelMesh, build_mesh
from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan, TensorSpec
from torchmm.pipelining.run.runtime import PipelineRuntime, channel_pairs
from torchmm.pipelining.schedules.classic import one_f_one_b
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.pipeline import Pipeline, unsplit_pipeline

Int64s = NDArray[np.int64]

SEED = 0
GROUPS, PIPELINE = 2, 2
TOKENS, IMAGE_TOKENS = 2048, 64
TOWER_LAYERS, LLM_LAYERS = 12, 16
MODES = ("natural", "intra", "inter", "both")
SHARDS, SHARDED_LAYERS = 4, 2
SHARD_ORDERS = ("natural", "equal sums", "equal slices", "balanced images")
QUIET = 0.3


@dataclass(frozen=True)
class Setting:
    """Extent of the measurement.

    Attributes:
        microbatches: Microbatches per pipeline or replica.
        llm_s: Sleep of the LLM forward pass per microbatch. The encoder mean is the same.
    """

    microbatches: int
    steps: int
    runs: int
    llm_s: float
    patience_s: float
    size: Size


FULL = Setting(8, 4, 7, 0.04, 1200, Size(4, 4, 96, 96))
QUICK = Setting(6, 2, 2, 0.02, 0, Size(2, 2, 64, 64))


def load_images(steps: int, per_step: int) -> list[list[int]]:
    """Return the image counts of the microbatches of each step, in dataset order."""
    packs = pack_documents(load_documents(), TOKENS, IMAGE_TOKENS, seed=SEED)
    images = [sum(sample.images for sample in pack) for pack in packs]
    return [images[i * per_step : (i + 1) * per_step] for i in range(steps)]


def arrange(mode: str, tower_s: Sequence[float], llm_s: Sequence[float], ordered: bool) -> Int64s:
    """Return microbatch indices of the global batch, of shape (groups, microbatches).

    Args:
        mode: Reordering mode.
        tower_s: Encoder forward time of each microbatch in seconds, in dataset order.
        llm_s: LLM forward time of each microbatch in seconds, in dataset order.
        ordered: Whether the ranks run a pipeline.
    """
    sizes = np.add(tower_s, llm_s)
    places = np.arange(len(sizes)).reshape(GROUPS, -1)
    if mode in ("intra", "both"):
        places = balance_groups(sizes, GROUPS)
    if mode in ("inter", "both") and ordered:
        graph = StageGraph(chain(), places.shape[1])
        program = compile_schedule(one_f_one_b(graph), graph)
        forward_GSM = np.stack([np.array(tower_s)[places], np.array(llm_s)[places]], axis=1)
        found = reorder_microbatches(program, forward_GSM, 2 * forward_GSM, seed=SEED)
        places = np.take_along_axis(places, found, axis=1)
    return places


def chain(modules: Sequence[str] = ("tower", "rest"), parts: Sequence[str] = ()) -> StageLayout:
    """Return a layout with one stage on each of two ranks."""
    layers = (TOWER_LAYERS, LLM_LAYERS)
    stages = tuple(
        StageSpec(i, name, 0, n, (i,))
        for i, (name, n) in enumerate(zip(modules, layers, strict=True))
    )
    return StageLayout(stages, ((0, 1),), frozenset(parts))


class SleepingPipelines:
    """Program that runs two pipelines with one arrangement. Plans are made in advance."""

    def __init__(self, mode: str, work: SleepWork, channels: P2PChannels) -> None:
        self.name = mode
        group, place = divmod(dist.get_rank(), PIPELINE)
        self.images, self.plans = [], []
        for images in work.images:
            tower_s = [work.forward_s(TOWER_LAYERS, 0, count) for count in images]
            llm_s = [work.forward_s(0, LLM_LAYERS, 0)] * len(images)
            own = arrange(mode, tower_s, llm_s, ordered=True)[group]
            self.images.append([images[i] for i in own])
            self.plans.append(sleeping_plan(self.images[-1]))
        layers = ((TOWER_LAYERS, 0), (0, LLM_LAYERS))[place]
        self.runtime = PipelineRuntime(place, {place: SleepStage(work, *layers)}, channels)

    def step(self, index: int) -> float:
        """Run a step with a gradient all-reduce, and return its compute time in seconds."""
        result = self.runtime.step(self.plans[index], self.images[index], record=True)
        dist.all_reduce(torch.zeros(1))
        done = (r for r in result.records or () if r.action.type in COMPUTE)
        return sum(r.end_ms - r.start_ms for r in done) / 1e3


def sleeping_plan(images: Sequence[int]) -> PipelinePlan:
    """Return a 1F1B plan, in which microbatches without images have no encoder task."""
    layout = chain(("vision", "llm"), ("vision",))
    graph = StageGraph(layout, len(images), {"vision": tuple(min(n, 1) for n in images)})
    specs = {
        message: (
            TensorSpec((message_rows(task, graph, images[task.microbatch]), WIDTH), torch.float32),
        )
        for task in graph.tasks()
        for message in graph.outgoing(task)
    }
    plan = lower_plan(one_f_one_b(graph), graph, specs)
    validate_plan(plan).raise_for_problems()
    return plan


class ComputingReplicas:
    """Program that runs two replicas of a model with one arrangement."""

    def __init__(
        self,
        mode: str,
        model: MultimodalModel,
        pipeline: Pipeline,
        steps: Sequence[Sequence[Microbatch]],
    ) -> None:
        self.name, self.model, self.pipeline = mode, model, pipeline
        modules = [module.describe() for module in model.modality_modules()]
        self.steps = []
        for batch in steps:
            costs = [microbatch_flops(modules, m.meta, m.target_count) for m in batch]
            tower, llm = (
                [float(c[name].forward + c[name].backward) for c in costs]
                for name in ("vision", "llm")
            )
            own = arrange(mode, tower, llm, ordered=False)[dist.get_rank()]
            self.steps.append([batch[i] for i in own])

    def step(self, index: int) -> float:
        """Run a step and return its compute time in seconds."""
        self.model.zero_grad()
        plan = self.pipeline.plan_training(self.steps[index])
        result = self.pipeline.run(plan, self.steps[index])
        for parameter in self.model.parameters():
            if parameter.grad is None:  # no images at all on this replica
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        done = (r for r in result.records or () if r.action.type in COMPUTE)
        return sum(r.end_ms - r.start_ms for r in done) / 1e3


class SleepingShards:
    """Program that runs FSDP2 shards with one arrangement.

    Gradients are reduced in every microbatch.

    Args:
        name: Name of the program.
        order: One of `SHARD_ORDERS`. "balanced images" has equal slices, and the images of a
            microbatch are distributed over all ranks.
        work: Images and durations.
        model: Layers that sleep.
    """

    def __init__(self, name: str, order: str, work: SleepWork, model: ShardedSleeper) -> None:
        self.name, self.model = name, model
        self.llm_s = work.forward_s(0, LLM_LAYERS, 0)
        self.steps: list[list[tuple[float, ExchangeCounts | None]]] = []
        """Forward time of the tower and exchanged images, by step and microbatch of this rank."""
        for images in work.images:
            tower_s = [work.forward_s(TOWER_LAYERS, 0, count) for count in images]
            places_RM = arrange_shards(order, tower_s, self.llm_s)
            images_MR = np.array(images)[places_RM].T.tolist()
            self.steps.append([self._microbatch(order, work, own_R) for own_R in images_MR])

    @staticmethod
    def _microbatch(
        order: str, work: SleepWork, images_R: list[int]
    ) -> tuple[float, ExchangeCounts | None]:
        rank, counts = dist.get_rank(), None
        encoded = images_R[rank]
        if order == "balanced images":
            homes = np.repeat(np.arange(len(images_R)), images_R)
            owners = assign_images(np.ones(len(homes), np.int64), homes, len(images_R))
            sent = np.bincount(homes[owners == rank], minlength=len(images_R))
            received = np.bincount(owners[homes == rank], minlength=len(images_R))
            counts = ExchangeCounts(sent.tolist(), received.tolist())
            encoded = sum(counts.sent)
        return work.forward_s(TOWER_LAYERS, 0, encoded), counts

    def step(self, index: int) -> float:
        """Return the seconds that the layers of this rank sleep."""
        for tower_s, counts in self.steps[index]:
            self.model(tower_s, self.llm_s, counts).backward()
        self.model.zero_grad()
        return 3 * sum(tower_s + self.llm_s for tower_s, _ in self.steps[index])


def draw_images(rng: np.random.Generator, count: int) -> list[int]:
    """Return images per microbatch, with the mixture of `bases/pipeweaver_vlm.toml`."""
    ranges = [((40, 48), (1, 14), (0, 0))[kind] for kind in rng.choice(3, count, p=(0.2, 0.6, 0.2))]
    return [int(rng.integers(low, high + 1)) for low, high in ranges]


def arrange_shards(order: str, tower_s: Sequence[float], llm_s: float) -> Int64s:
    """Return the microbatches (ranks, M) of each shard."""
    costs_KN, ranks = np.stack([tower_s, np.full(len(tower_s), llm_s)]), dist.get_world_size()
    if order in ("equal slices", "balanced images"):
        return slice_microbatches(np.round(1e9 * costs_KN), 1, ranks)
    if order == "equal sums":
        return balance_groups(costs_KN.sum(axis=0), ranks)
    return np.arange(len(tower_s)).reshape(ranks, -1)


def run_shards(setting: Setting) -> Comparison:
    """Compare all orders on one of the FSDP2 shards."""
    rng = np.random.default_rng(SEED)
    images = [draw_images(rng, SHARDS * setting.microbatches) for _ in range(setting.steps)]
    average = mean(count for step in images for count in step)
    work = SleepWork(images, setting.llm_s / LLM_LAYERS, setting.llm_s / (TOWER_LAYERS * average))
    model = ShardedSleeper(SHARDED_LAYERS)
    programs = [SleepingShards(order, order, work, model) for order in SHARD_ORDERS]
    return Stopwatch(setting.patience_s, QUIET).compare(programs, setting.steps, setting.runs)


def run_sleeping(setting: Setting) -> Comparison:
    """Compare all modes on one of four ranks."""
    images = load_images(setting.steps, GROUPS * setting.microbatches)
    layer_s = setting.llm_s / LLM_LAYERS
    average = mean(count for step in images for count in step)
    work = SleepWork(images, layer_s, setting.llm_s / (TOWER_LAYERS * average))
    first = dist.get_rank() // PIPELINE * PIPELINE
    channels = P2PChannels(torch.device("cpu"), range(first, first + PIPELINE), 120)
    channels.warm_up(channel_pairs(chain()))
    programs = [SleepingPipelines(mode, work, channels) for mode in MODES]
    return Stopwatch(setting.patience_s, QUIET).compare(programs, setting.steps, setting.runs)


def run_computing(setting: Setting) -> Comparison:
    """Compare all modes on one of two ranks."""
    packs = pack_documents(load_documents(), TOKENS // 4, IMAGE_TOKENS // 4, 4, SEED)
    per_step = GROUPS * setting.microbatches
    made = [make_microbatch(p, i) for i, p in enumerate(packs[: setting.steps * per_step])]
    steps = [made[i * per_step : (i + 1) * per_step] for i in range(setting.steps)]
    model = setting.size.build()
    mesh: ParallelMesh = build_mesh(ParallelConfig(replicate=2, shard=1), torch.device("cpu"))
    pipeline = unsplit_pipeline(model, mesh, torch.float32)
    programs = [ComputingReplicas(mode, model, pipeline, steps) for mode in MODES[:2]]
    return Stopwatch(setting.patience_s, QUIET).compare(programs, setting.steps, setting.runs)


def rows_of(case: str, found: Comparison) -> list[Row]:
    """Return rows that compare every mode with the natural order."""
    rows = []
    for mode in (m for m in (*MODES[1:], *SHARD_ORDERS[1:]) if m in found.times):
        rows += [
            Row(case, f"speedup, {mode}", "x", found.speed_ratio(mode, "natural"), 1.0),
            Row(case, f"step, {mode}", "s", found.wall_s(mode), found.wall_s("natural"),
                better="lower"),
        ]  # fmt: skip
    return rows


def main() -> None:
    """Print the table."""
    arguments = make_parser((__doc__ or "").splitlines()[0]).parse_args()
    setting = QUICK if arguments.quick else FULL
    cases: dict[str, Any] = {
        "4 ranks, 2 pipelines of encoder and LLM, sleeping": (run_sleeping, GROUPS * PIPELINE),
        "2 data-parallel ranks, computing": (run_computing, GROUPS),
        "4 FSDP2 shards, sleeping": (run_shards, SHARDS),
    }
    rows = []
    for case, (function, ranks) in cases.items():
        found = run_ranks(function, ranks, setting)
        rows += rows_of(case, found)
        print(f"{case}: {found}")
    title = f"Reordering, real time; seed {SEED}; {describe_machine(torch.device('cpu'))}"
    report(title, rows, arguments.json)


if __name__ == "__main__":
    main()
