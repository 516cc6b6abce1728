"""Pipelines with random layouts, orders and images give the results of one process."""

import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed
from model_cases import SPEECH
from pipeline_cases import Case, CaseRun
from random_orders import random_graph, random_order
from torch import Tensor
from toy_stages import ToyStage, compare, gradients, reference, toy_specs, toy_stages

from torchmm.parallel.mesh import start_process_group
from torchmm.parallel.p2p import P2PChannels, PendingTransfer
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.pipelining.run.stage import StageOutput
from torchmm.recipe.parallel_section import ParallelConfig

CPU = torch.device("cpu")
FREEZES = {
    "nothing": (),
    "the tower": ("vision",),
    "the LLM": ("llm",),
    "all but the connector": ("vision", "llm"),
}
BF16_TOLERANCE = 2e-2
DELTA_TOLERANCE = 5e-5
"""Gradients of decays are small differences of large sums (`test_delta_net`)."""
CASES = {
    "2": [
        *(Case(f"pp2, {n} frozen", 2, freeze=f) for n, f in FREEZES.items()),
        Case("pp2, only the connector, images of any size", 2, encoder="siglip2",
             freeze=("vision", "llm")),
        Case("pp2, deepstack", 2, encoder="qwen3_vl"),
        Case("pp2, Qwen3.5", 2, encoder="qwen3_5", seeds=(0,), tolerance=DELTA_TOLERANCE),
        Case("pp2, untied", 2, tied=False),
        Case("pp2, selective recomputation", 2, recompute="selective"),
        Case("pp2, bf16", 2, dtype=torch.bfloat16, tolerance=BF16_TOLERANCE),
        Case("fsdp2 gathered once", shard=2, seeds=(0, 1)),
    ],
    "2 more": [
        Case("pp2, speech and images of any size", 2, encoder="whisper", second="siglip2"),
        Case("pp2, experts and deepstack", 2, encoder="qwen3_vl_moe", seeds=(0, 1)),
        Case("pp2, Omni, audio frozen", 2, encoder="qwen3_omni", freeze=("audio",), seeds=(1,)),
        Case("pp2, images of any size", 2, encoder="siglip2"),
        Case("pp2, speech", 2, encoder="whisper", freeze=("vision",)),
        Case("pp2, deepstack, tower frozen", 2, encoder="qwen3_vl", freeze=("vision",), seeds=(1,)),
        Case("pp2, deepstack, recomputation", 2, encoder="qwen3_vl", recompute="full", seeds=(1,)),
        Case("pp2, Omni", 2, encoder="qwen3_omni", seeds=(0, 1)),
        Case("pp2, Qwen2.5-Omni", 2, encoder="qwen2_5_omni", seeds=(0, 1)),
        Case("pp2, GLM-4V", 2, encoder="glm4v", seeds=(0, 1)),
        Case("pp2, Mistral 3", 2, encoder="mistral3", seeds=(0, 1)),
        Case("pp2, Gemma 4", 2, encoder="gemma4", seeds=(0, 1)),
        *(Case(f"pp2, {n}, untied", 2, encoder=n, tied=False, seeds=(0, 1)) for n in SPEECH),
        Case("pp2, Audio Flamingo 3, untied, tower frozen", 2, encoder="audioflamingo3", tied=False,
             freeze=("audio",), seeds=(1,)),
        Case("pp2, delta nets", 2, delta=True, recompute="selective", tolerance=DELTA_TOLERANCE),
        Case("pp2, recomputation", 2, recompute="full"),
    ],
    "4": [
        *(Case(f"pp4, {n} frozen", 4, freeze=f, seeds=(0, 1)) for n, f in FREEZES.items()),
        *(Case(f"pp2 x fsdp2, {n} frozen", 2, shard=2, freeze=f, seeds=(0, 1))
          for n, f in FREEZES.items()),
        Case("pp2 x fsdp2, images of any size", 2, shard=2, encoder="siglip2", seeds=(0, 1)),
        Case("pp2 x fsdp2, bf16", 2, shard=2, dtype=torch.bfloat16, tolerance=BF16_TOLERANCE,
             seeds=(0, 1)),
        Case("pp2 x fsdp2, speech and images", 2, shard=2, encoder="whisper", second="clip",
             seeds=(0, 1)),
        Case("pp4, deepstack", 4, encoder="qwen3_vl", seeds=(0, 1)),
        Case("pp2 x fsdp2, deepstack", 2, shard=2, encoder="qwen3_vl", seeds=(0, 1)),
        Case("pp2 x fsdp2, deepstack, bf16", 2, shard=2, encoder="qwen3_vl", seeds=(1,),
             dtype=torch.bfloat16, tolerance=BF16_TOLERANCE),
        Case("pp2 x tp2, deepstack", 2, tensor=2, encoder="qwen3_vl", seeds=(0,)),
        Case("pp2 x tp2, deepstack, sequence parallel", 2, tensor=2, sequence_parallel=True,
             encoder="qwen3_vl", seeds=(0, 5)),
        Case("pp2 x fsdp2, Qwen3.5", 2, shard=2, encoder="qwen3_5", seeds=(0, 1),
             tolerance=DELTA_TOLERANCE),
        Case("pp2 x tp2, Qwen3.5, sequence parallel", 2, tensor=2, sequence_parallel=True,
             encoder="qwen3_5", seeds=(0,), tolerance=DELTA_TOLERANCE),
        *(Case(f"pp2 x fsdp2, {n}", 2, shard=2, encoder=n, seeds=(0,))
          for n in ("qwen2_5_omni", "qwen3_omni", "glm4v", "mistral3", "gemma4")),
        Case("pp2 x fsdp2, experts and deepstack", 2, shard=2, encoder="qwen3_vl_moe", seeds=(0,)),
        Case("pp2 x tp2, experts and deepstack", 2, tensor=2, encoder="qwen3_vl_moe", seeds=(0,)),
        Case("pp2 x tp2, speech", 2, tensor=2, encoder="whisper", seeds=(0,)),
        *(Case(f"pp2 x tp2, {n}, untied", 2, tensor=2, encoder=n, tied=False, seeds=(0,),
               sequence_parallel=n != "voxtral") for n in SPEECH),
        Case("pp2 x fsdp2, Qwen2-Audio, untied", 2, shard=2, encoder="qwen2_audio", tied=False,
             seeds=(0,)),
        Case("pp2 x replicate2", 2, replicate=2, seeds=(0, 1)),
        Case("pp2 x tp2", 2, tensor=2, seeds=(0,)),
        Case("pp2 x tp2, delta nets", 2, tensor=2, sequence_parallel=True, delta=True, seeds=(0,),
             tolerance=DELTA_TOLERANCE),
        Case("pp2 x fsdp2, delta nets", 2, shard=2, delta=True, seeds=(0,),
             tolerance=DELTA_TOLERANCE),
        Case("pp2 x tp2, the LLM frozen", 2, tensor=2, freeze=("llm",), seeds=(1,)),
        Case("pp2 x tp2, sequence parallel", 2, tensor=2, sequence_parallel=True, seeds=(0, 5)),
    ],
}  # fmt: skip
TOY_SEEDS = {"2": range(12), "2 more": range(12, 80), "4": range(200, 220)}
"""Seeds of random graphs with toy stages, by name of the world."""
LOSS_SCALE = 0.3


@pytest.fixture(
    scope="module",
    params=["2", *(pytest.param(world, marks=pytest.mark.campaign) for world in ("2 more", "4"))],
)
def outcomes(request) -> list[dict[str, Any]]:
    """Return the results of all ranks of a world."""
    return run_distributed(_run_all, int(request.param[0]), request.param)


def _run_all(world: str) -> dict[str, Any]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    results = _toys(TOY_SEEDS[world])
    results["world"], results["cases"], results["collectives"] = world, [], []
    for case in CASES[world]:
        run = CaseRun(case)
        for seed in case.seeds:
            results["cases"].append((case.name, seed, run.errors(seed), run.tied_digest()))
        if case.shard > 1:
            results["collectives"] += [(case.name, *run.collectives(s)) for s in case.seeds[:2]]
    if world == "2":
        results["controls"] = _controls()
    return results


@pytest.mark.slow
def test_random_orders_of_toys_equal_one_process(outcomes):
    for results in outcomes:
        assert results["steps"] == len(TOY_SEEDS[results["world"]])
        assert results["wrong"] == {}


@pytest.mark.slow
def test_random_orders_of_models_equal_one_process(outcomes):
    for results in outcomes:
        for name, seed, errors, _ in results["cases"]:
            assert errors == {}, (name, seed, errors)


@pytest.mark.slow
def test_tied_replicas_have_bitwise_equal_gradients(outcomes):
    compared = 0
    for entries in zip(*(results["cases"] for results in outcomes), strict=True):
        name, seed = entries[0][:2]
        digests = [digest for *_, digest in entries if digest is not None]
        if "untied" in name:
            assert len(set(digests)) == 2, "control: untied weights have different gradients"
        elif len(digests) > 1:
            assert len(set(digests)) == 1, (name, seed)
            compared += 1
    assert compared


@pytest.mark.slow
def test_parameters_are_gathered_and_reduced_once(outcomes):
    for results in outcomes:
        assert results["collectives"] or results["world"] == "2 more"
        for name, actual, expected in results["collectives"]:
            assert actual == expected, name
            assert expected["all-gather"] > 1, name


@pytest.mark.slow
def test_comparison_detects_wrong_steps(outcomes):
    if "controls" not in outcomes[0]:
        pytest.skip("requires two ranks")
    wrong: dict[str, list[bool]] = {}
    for results in outcomes:
        for name, errors in results["controls"].items():
            wrong.setdefault(name, []).append(bool(errors))
    assert not any(wrong.pop("nothing wrong"))
    assert len(wrong) == 4
    for name, by_rank in wrong.items():
        assert any(by_rank), f"{name}: not detected"


def _toys(seeds: Sequence[int]) -> dict[str, Any]:
    """Run steps of random graphs and return the errors by seed."""
    world, rank = dist.get_world_size(), dist.get_rank()
    channels = P2PChannels(CPU, range(world), 60.0)
    channels.warm_up(permutations(range(world), 2))
    wrong: dict[int, Any] = {}
    for seed in seeds:
        graph = random_graph(seed, ranks=world)
        data = [10 * seed + i for i in range(graph.microbatches)]
        result = _toy_step(graph, seed, data, channels, toy_stages(graph, rank))
        if errors := _toy_errors(graph, data, result):
            wrong[seed] = errors
    return {"steps": len(seeds), "wrong": wrong}


ToyResult = tuple[dict[int, float], dict[str, Tensor]]


def _toy_step(
    graph: StageGraph,
    seed: int,
    data: Sequence[int],
    channels: P2PChannels,
    stages: dict[int, ToyStage],
) -> ToyResult:
    rank = dist.get_rank()
    if rank >= graph.layout.rank_count:
        return {}, {}
    plan = lower_plan(random_order(graph, seed), graph, toy_specs(graph), receives_ahead=seed % 4)
    validate_plan(plan).raise_for_problems()
    result = PipelineRuntime(rank, stages, channels).step(plan, data, loss_scale=LOSS_SCALE)
    return {m: loss.item() for m, loss in result.losses.items()}, gradients(stages)


def _toy_errors(graph: StageGraph, data: Sequence[int], result: ToyResult) -> dict[str, float]:
    """Return relative errors of the sums over ranks.

    LLM, generator and replicas are on several ranks.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, result)
    losses, grads = reference(graph, data, LOSS_SCALE)
    summed: dict[str, Tensor] = {}
    errors = {}
    for _, rank_gradients in by_rank:
        for name, grad in rank_gradients.items():
            summed[name] = summed[name] + grad if name in summed else grad
    for index, expected in losses.items():
        loss = sum(rank_gradients.get(index, 0.0) for rank_gradients, _ in by_rank)
        if not abs(loss - expected) <= 1e-5 * abs(expected):
            errors[f"loss {index}"] = abs(loss / expected - 1)
    return errors | compare(summed, grads)


class _CorruptChannels(P2PChannels):
    """Channels that scale the first sent gradient by 1.001."""

    corrupt = False

    def send(
        self,
        tensors: Sequence[Tensor],
        specs: Sequence[Any],
        peer: int,
        action: Any,
        cuts: Sequence[Any] = (),
    ) -> PendingTransfer:
        if self.corrupt and "SEND_B" in str(action):
            self.corrupt = False
            tensors = [tensors[0] * 1.001, *tensors[1:]]
        return super().send(tensors, specs, peer, action, cuts)


class _DroppingStage(ToyStage):
    """Stage that drops the second sub-microbatch: its `outputs`, or only its `gradients`."""

    lost = "outputs"

    def forward(
        self, task: Task, inputs: Sequence[tuple[Tensor, ...]], microbatch: Any, graph: StageGraph
    ) -> StageOutput:
        output = super().forward(task, inputs, microbatch, graph)
        if graph.task_count(task.stage, task.microbatch) > 1 and task.sub_microbatch == 1:
            factor = 0.0 if self.lost == "outputs" else 1.0
            output.messages = [
                (first.detach() * factor, *others) for first, *others in output.messages
            ]
        return output


def _controls() -> dict[str, dict[str, float]]:
    """Return the errors of the comparison for each injected defect."""
    rank = dist.get_rank()
    chain = [("vision", 0), ("vision", 1), ("llm", 0), ("llm", 1)]
    stages = tuple(StageSpec(i, m, i % 2, i % 2 + 1, (r,)) for i, (m, r) in enumerate(chain))
    layout = StageLayout(stages, ((0, 1), (1, 2), (2, 3)), frozenset({"vision"}))
    graph = StageGraph(layout, 4, {"vision": (2, 0, 3, 1)})
    channels = _CorruptChannels(CPU, [0, 1], 60.0)
    data = [random.Random(i).randrange(1000) for i in range(4)]
    swapped = [data[0], data[2], data[1], data[3]] if rank == 0 else data

    def errors(inputs: Sequence[int], lost: str | None = None) -> dict[str, float]:
        stages_of_rank = toy_stages(graph, rank)
        if lost is not None and rank == 1:
            stages_of_rank[1] = _DroppingStage(stages_of_rank[1].module)
            stages_of_rank[1].lost = lost
        return _toy_errors(graph, data, _toy_step(graph, 5, inputs, channels, stages_of_rank))

    errors_by_defect = {"nothing wrong": errors(data)}
    channels.corrupt = rank == 1
    errors_by_defect["a gradient changed by 0.1 %"] = errors(data)
    errors_by_defect["a sub-microbatch dropped"] = errors(data, "outputs")
    errors_by_defect["the gradient of a sub-microbatch dropped"] = errors(data, "gradients")
    errors_by_defect["two microbatches swapped on one rank"] = errors(swapped)
    return errors_by_defect
