"""Encoder kernels that run during LLM collectives give the gradients of a single process.

The harness is that of the colocated encoders. Plans assume a device that computes during
communication. The gloo collectives are asynchronous as well.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from launch import run_distributed
from model_cases import LLMS, build, microbatch
from test_colocated_equality import CPU, Case, _compare

from torchmm.balance.optimus import encoder_overlap
from torchmm.balance.optimus.encoder_overlap import UNLIMITED_PIECES, EncoderOverlap
from torchmm.balance.optimus.launch_planning import plan_launches
from torchmm.balance.optimus.launches import add_launches
from torchmm.balance.optimus.layer_pieces import layer_collectives
from torchmm.balance.plan_costs import LayerPiece, LayerPieces, PlanCosts
from torchmm.balance.simulation.simulator import simulate
from torchmm.costs.execution import Execution
from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.parallel.tensor.collectives import HookedCollectives
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.schedules.colocated import encoder_stages
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig

CASES = {
    2: [
        Case(1, 1, slices=None, tensor=2, split=1),
        Case(1, 1, slices=2, tensor=2, split=1, sequence_parallel=True, freeze="llm"),
        Case(1, 1, slices=None, tensor=2, split=1, tight=True),
    ],
    4: [
        # Tensor-parallel encoders, which have collectives.
        Case(2, 1, slices=None, tensor=2),
        Case(2, 1, slices=2, tensor=2, sequence_parallel=True, virtual=2),
        Case(2, 2, slices=2, tensor=2, sequence_parallel=True),
        Case(2, 1, slices=2, tensor=2, llm_schedule="zero_bubble", encoders=2),
        Case(2, 1, slices=2, tensor=2, sequence_parallel=True, freeze="tower"),
        Case(2, 1, slices=2, tensor=2, composite="qwen3_vl"),
        Case(1, 1, slices=2, tensor=4, split=2, sequence_parallel=True),
        # Unsharded encoders on each tensor-parallel rank of the LLM.
        Case(2, 1, slices=2, tensor=2, split=1),
        Case(1, 1, slices=2, shard=2, tensor=2, split=1, sequence_parallel=True),
        # Kernels of backwards that recompute their layers first.
        Case(2, 1, slices=2, tensor=2, sequence_parallel=True, virtual=2, tight=True),
        Case(2, 1, slices=2, tensor=2, split=1, tight=True),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_launched_kernels_equal_one_process(ranks):
    outcomes = run_distributed(_compare_all, ranks, CASES[ranks])
    for of_case in zip(*outcomes, strict=True):
        for rank, (case, problems, planned, executed) in enumerate(of_case):
            assert not problems, (rank, case, problems)
            # Frozen layers have no backward kernels.
            assert executed == planned or case.freeze == "tower", (rank, case, planned, executed)
            assert executed >= planned / 2, (rank, case, planned, executed)
        # Not every data-parallel rank has kernels to launch.
        assert max(planned for _, _, planned, _ in of_case) > 10


@pytest.mark.slow
def test_missing_gradient_sum_changes_gradients():
    """Negative control: gradients of shared inputs are not summed."""
    case = CASES[2][0]
    for results in run_distributed(partial(_compare_all, broken=True), 2, [case]):
        ((_, problems, _, _),) = results
        assert any("llm" in problem for problem in problems), problems


@pytest.mark.slow
def test_launches_before_their_inputs_are_rejected():
    """Validation rejects the plan. Without validation, the runtime does."""
    errors = run_distributed(_run_early_launch, 2)
    assert any("requires" in each and "which is not available" in each for each in errors), errors


class CountingAhead(EncoderOverlap):
    """Overlap state that counts the encoder kernels that run during collectives."""

    executed = 0

    def _run_thread(self, pieces: int) -> None:
        super()._run_thread(pieces)
        if pieces != UNLIMITED_PIECES:
            CountingAhead.executed += pieces - max(0, self._remaining_pieces)


def _compare_all(cases: list[Case], broken: bool = False) -> list[tuple[Case, list[str], int, int]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    encoder_overlap.EncoderOverlap = CountingAhead  # type: ignore[misc]
    if broken:
        HookedCollectives.sum = lambda self, x: x  # type: ignore[method-assign]
    results = []
    for case in cases:
        config, mesh = _pieces(case)
        plans: list[PipelinePlan] = []
        CountingAhead.executed = 0
        problems, *_ = _compare(case, config, mesh, partial(_launch, plans, config))
        planned = sum(
            sum(plans[0].launches[llm].pieces_per_collective)
            for llm in plans[0].actions[mesh.plan_rank]
            if llm in plans[0].launches
        )
        results.append((case, problems, planned, CountingAhead.executed))
    return results


def _pieces(case: Case) -> tuple[ParallelConfig, ParallelMesh]:
    config = case.parallel.model_copy(update={"tp_comm_fraction": 0.3})
    return config, build_mesh(config, CPU)


def costs_of(plan: PipelinePlan, config: ParallelConfig) -> PlanCosts:
    """Return costs of a device on which all encoder layers take as long as five bubbles."""
    encoders = encoder_stages(plan.graph)
    split = config.mirrors < config.tensor
    execution = Execution(tensor=2 if split else 1, sequence_parallel=config.sequence_parallel)
    part = [LayerPiece(1 / 6, False), LayerPiece(1 / 6, False), LayerPiece(1 / 6, split)]
    if split and config.sequence_parallel:
        part = [LayerPiece(0.0, True), *part]
    layer = LayerPieces(tuple(part * 2), tuple(part * 2))
    names = {plan.graph.layout.stages[index].module for index in encoders}
    compute = {}
    for task in plan.graph.tasks():
        for kind in COMPUTE:
            compute[Action(kind, *task)] = 1.0 if task.stage in encoders else 8.0
    tensor = {a: 0.4 * ms for a, ms in compute.items() if split or a.stage not in encoders}
    collectives = layer_collectives(replace(execution, tensor=2))
    return PlanCosts(
        compute,
        tensor,
        overlaps_communication=True,
        pieces=dict.fromkeys(names, layer),
        collectives=collectives,
    )


def _launch(plans: list[PipelinePlan], config: ParallelConfig, plan: PipelinePlan) -> PipelinePlan:
    """Add launches to the plan, and check the plan."""
    costs = costs_of(plan, config)
    launched = add_launches(plan, plan_launches(plan, costs))
    validate_plan(launched).raise_for_problems()
    assert simulate(launched, costs).makespan_ms <= simulate(plan, costs).makespan_ms
    plans.append(launched)
    return launched


def _run_early_launch() -> str:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    case = CASES[2][0]
    config, mesh = _pieces(case)
    try:
        _compare(case, config, mesh, partial(_launch_too_early, config))
    except (ValueError, RuntimeError) as error:  # the other rank loses this one in a collective
        return str(error)
    return ""


def _launch_too_early(config: ParallelConfig, plan: PipelinePlan) -> PipelinePlan:
    """Launch a backward of the encoder in the LLM forward of the same microbatch."""
    launched = _launch([], config, plan)
    encoders = encoder_stages(launched.graph)
    launches = dict.fromkeys(launched.launches)
    for program in launched.actions:
        compute = [a for a in program if a.type in COMPUTE]
        backward = next(a for a in compute if a.stage in encoders and a.type is ActionType.B)
        llm = next(
            a for a in compute if a.stage not in encoders and a.microbatch == backward.microbatch
        )
        launches[llm] = launched.launches[next(iter(launched.launches))]._replace(
            encoder_actions=(backward,), pieces_per_collective=(9, 9)
        )
    valid = {llm: launch for llm, launch in launches.items() if launch is not None}
    wrong = replace(launched, launches=valid)
    assert "dependency" in {problem.kind for problem in validate_plan(wrong).problems}
    return wrong


FAMILIES = ("llama", "qwen3", "phi3", "olmo2", "gemma3_text", "qwen3_5", "qwen3_moe")


@pytest.mark.slow
def test_work_during_collectives_keeps_gradients():
    """Run a callback during the collectives of tensor-parallel LLMs.

    The loss and gradients are unchanged, and the number of calls matches the plan.
    """
    for outcomes in zip(*run_distributed(_compare_families, 2, FAMILIES), strict=True):
        for family, sequence_parallel, errors, calls, expected in outcomes:
            assert errors == {}, (family, sequence_parallel, errors)
            if family in ("llama", "qwen3"):
                assert calls == expected, (family, sequence_parallel)
            assert min(calls) > 0


def _compare_families(families: tuple[str, ...]) -> list[tuple]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    mesh = build_mesh(ParallelConfig(shard=1, tensor=2), CPU)
    return [
        (family, split, *_compare_family(family, split, mesh))
        for family in families
        for split in (False, True)
    ]


def _compare_family(
    family: str, sequence_parallel: bool, mesh: ParallelMesh
) -> tuple[dict[str, float], list[int], list[int]]:
    config = ModelConfig(llm=LlmConfig(config=LLMS[family]))
    full, split = build(config), build_model(config, FreezeConfig())
    calls: list[int] = [0]

    def meanwhile() -> None:
        calls[-1] += 1

    tensor = mesh.module_mesh.tensor
    apply_tensor_parallel(split.llm, tensor, sequence_parallel, overlap_hook=meanwhile)
    materialize(split, "cpu")
    init_weights(split, seed=0)
    weights = full.state_dict()
    for name, parameter in split.state_dict(keep_vars=True).items():
        copy_slice(parameter, weights[name])
    batch = microbatch([5, 9, 9])
    expected, loss = full(batch), split(batch)
    calls.append(0)
    expected.backward()
    loss.backward()
    errors = {}
    if abs(loss.item() / expected.item() - 1) > 1e-5:
        errors["loss"] = loss.item() / expected.item() - 1
    for (name, sharded), (_, reference) in zip(
        split.named_parameters(), full.named_parameters(), strict=True
    ):
        grad = sharded.grad.full_tensor() if hasattr(sharded.grad, "full_tensor") else sharded.grad
        error = ((grad - reference.grad).norm() / reference.grad.norm()).item()
        if not error <= 3e-5:
            errors[name] = error
    sharded = Execution(tensor=2, sequence_parallel=sequence_parallel)
    layers = len(split.llm.layers)
    return errors, calls, [layers * each for each in layer_collectives(sharded)]
