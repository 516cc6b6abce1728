"""Encoder layers in pieces at the LLM's collectives give the gradients of the single process.

The harness is that of colocated encoders. Plans are made as for a device that computes beside its
communication; gloo's collectives are begun, left alone and waited for like any.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from launch import run_distributed
from model_cases import LLMS, build, microbatch
from test_colocated_equality import CPU, Case, _compare

from torchmm.balance.optimus import ahead
from torchmm.balance.optimus.ahead import UNLIMITED, Ahead
from torchmm.balance.optimus.launch_choice import plan_launches
from torchmm.balance.optimus.launches import with_launches
from torchmm.balance.optimus.layer_pieces import layer_collectives
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.step_costs import LayerPieces, Piece, PlanCosts
from torchmm.costs.execution import Execution
from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.parallel.mesh import ParallelMesh, build_mesh, start_process_group
from torchmm.parallel.tensor.apply import apply_tensor_parallel
from torchmm.parallel.tensor.collectives import Exchange
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
        # Encoders that are split, with collectives of their own.
        Case(2, 1, slices=None, tensor=2),
        Case(2, 1, slices=2, tensor=2, sequence_parallel=True, virtual=2),
        Case(2, 2, slices=2, tensor=2, sequence_parallel=True),
        Case(2, 1, slices=2, tensor=2, llm_schedule="zero_bubble", encoders=2),
        Case(2, 1, slices=2, tensor=2, sequence_parallel=True, freeze="tower"),
        Case(2, 1, slices=2, tensor=2, composite="qwen3_vl"),
        Case(1, 1, slices=2, tensor=4, split=2, sequence_parallel=True),
        # Whole encoders on each rank of the LLM's group.
        Case(2, 1, slices=2, tensor=2, split=1),
        Case(1, 1, slices=2, shard=2, tensor=2, split=1, sequence_parallel=True),
        # Pieces of backwards that run their layers again first.
        Case(2, 1, slices=2, tensor=2, sequence_parallel=True, virtual=2, tight=True),
        Case(2, 1, slices=2, tensor=2, split=1, tight=True),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_launched_pieces_equal_one_process(ranks):
    outcomes = run_distributed(_compare_all, ranks, CASES[ranks])
    for of_case in zip(*outcomes, strict=True):
        for rank, (case, problems, planned, ran) in enumerate(of_case):
            assert not problems, (rank, case, problems)
            # Layers that are frozen have no backward, and so none of its pieces.
            assert ran == planned or case.freeze == "tower", (rank, case, planned, ran)
            assert ran >= planned / 2, (rank, case, planned, ran)
        # With several shares of the batch, not every one has something to launch.
        assert max(planned for _, _, planned, _ in of_case) > 10


@pytest.mark.slow
def test_a_sum_that_is_left_out_is_noticed():
    """Negative control: gradients of what ranks share are not added up."""
    case = CASES[2][0]
    for found in run_distributed(partial(_compare_all, broken=True), 2, [case]):
        ((_, problems, _, _),) = found
        assert any("llm" in problem for problem in problems), problems


@pytest.mark.slow
def test_launches_of_what_is_not_there_are_refused():
    """By validation, and by the runtime where nobody has validated the plan."""
    found = run_distributed(_too_early, 2)
    assert any("requires" in each and "which is not available" in each for each in found), found


class Counted(Ahead):
    """Counts the pieces that run during collectives."""

    ran = 0

    def _switch(self, pieces: int) -> None:
        super()._switch(pieces)
        if pieces != UNLIMITED:
            Counted.ran += pieces - max(0, self._left)


def _compare_all(cases: list[Case], broken: bool = False) -> list[tuple[Case, list[str], int, int]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    ahead.Ahead = Counted  # type: ignore[misc]
    if broken:
        Exchange.sum = lambda self, x: x  # type: ignore[method-assign]
    found = []
    for case in cases:
        config, mesh = _pieces(case)
        plans: list[PipelinePlan] = []
        Counted.ran = 0
        problems, *_ = _compare(case, config, mesh, partial(_launch, plans, config))
        planned = sum(
            sum(plans[0].launches[llm].pieces)
            for llm in plans[0].actions[mesh.pipeline_rank]
            if llm in plans[0].launches
        )
        found.append((case, problems, planned, Counted.ran))
    return found


def _pieces(case: Case) -> tuple[ParallelConfig, ParallelMesh]:
    config = case.parallel.model_copy(update={"tp_comm_fraction": 0.3})
    return config, build_mesh(config, CPU)


def costs_of(plan: PipelinePlan, config: ParallelConfig) -> PlanCosts:
    """As of a device where all encoder layers together take as long as a bubble does five times."""
    encoders = encoder_stages(plan.graph)
    split = config.mirrors < config.tensor
    own = Execution(tensor=2 if split else 1, sequence_parallel=config.sequence_parallel)
    part = [Piece(1 / 6, False), Piece(1 / 6, False), Piece(1 / 6, split)]
    if split and config.sequence_parallel:
        part = [Piece(0.0, True), *part]
    layer = LayerPieces(tuple(part * 2), tuple(part * 2))
    names = {plan.graph.layout.stages[index].module for index in encoders}
    compute = {}
    for task in plan.graph.tasks():
        for kind in COMPUTE:
            compute[Action(kind, *task)] = 1.0 if task.stage in encoders else 8.0
    tensor = {a: 0.4 * ms for a, ms in compute.items() if split or a.stage not in encoders}
    both = layer_collectives(replace(own, tensor=2))
    return PlanCosts(
        compute, tensor, runs_beside=True, pieces=dict.fromkeys(names, layer), collectives=both
    )


def _launch(plans: list[PipelinePlan], config: ParallelConfig, plan: PipelinePlan) -> PipelinePlan:
    """The plan with launches; the first one that is made is looked at."""
    costs = costs_of(plan, config)
    found = with_launches(plan, plan_launches(plan, costs))
    validate_plan(found).raise_for_problems()
    assert simulate(found, costs).makespan_ms <= simulate(plan, costs).makespan_ms
    plans.append(found)
    return found


def _too_early() -> str:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    case = CASES[2][0]
    config, mesh = _pieces(case)
    try:
        _compare(case, config, mesh, partial(_earlier, config))
    except (ValueError, RuntimeError) as error:  # its neighbour loses it in a collective
        return str(error)
    return ""


def _earlier(config: ParallelConfig, plan: PipelinePlan) -> PipelinePlan:
    """A backward of the encoder begins in the LLM's forward of the same microbatch."""
    found = _launch([], config, plan)
    encoders = encoder_stages(found.graph)
    launches = dict.fromkeys(found.launches)
    for program in found.actions:
        row = [a for a in program if a.type in COMPUTE]
        backward = next(a for a in row if a.stage in encoders and a.type is ActionType.B)
        llm = next(
            a for a in row if a.stage not in encoders and a.microbatch == backward.microbatch
        )
        launches[llm] = found.launches[next(iter(found.launches))]._replace(
            begins=(backward,), pieces=(9, 9)
        )
    own = {llm: launch for llm, launch in launches.items() if launch is not None}
    wrong = replace(found, launches=own)
    assert "dependency" in {problem.kind for problem in validate_plan(wrong).problems}
    return wrong


FAMILIES = ("llama", "qwen3", "phi3", "olmo2", "gemma3_text", "qwen3_5", "qwen3_moe")


@pytest.mark.slow
def test_what_is_done_meanwhile_changes_nothing():
    """Loss and gradients of split LLMs whose collectives are left alone for a while; how often."""
    for outcomes in zip(*run_distributed(_compare_families, 2, FAMILIES), strict=True):
        for family, sequence_parallel, errors, calls, wanted in outcomes:
            assert errors == {}, (family, sequence_parallel, errors)
            if family in ("llama", "qwen3"):
                assert calls == wanted, (family, sequence_parallel)
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
    whole, split = build(config), build_model(config, FreezeConfig())
    calls: list[int] = [0]

    def meanwhile() -> None:
        calls[-1] += 1

    tensor = mesh.own.tensor
    apply_tensor_parallel(split.llm, tensor, sequence_parallel, meanwhile=meanwhile)
    materialize(split, "cpu")
    init_weights(split, seed=0)
    weights = whole.state_dict()
    for name, parameter in split.state_dict(keep_vars=True).items():
        copy_slice(parameter, weights[name])
    batch = microbatch([5, 9, 9])
    wanted, loss = whole(batch), split(batch)
    calls.append(0)
    wanted.backward()
    loss.backward()
    errors = {}
    if abs(loss.item() / wanted.item() - 1) > 1e-5:
        errors["loss"] = loss.item() / wanted.item() - 1
    for (name, own), (_, other) in zip(
        split.named_parameters(), whole.named_parameters(), strict=True
    ):
        found = own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad
        error = ((found - other.grad).norm() / other.grad.norm()).item()
        if not error <= 3e-5:
            errors[name] = error
    own = Execution(tensor=2, sequence_parallel=sequence_parallel)
    layers = len(split.llm.layers)
    return errors, calls, [layers * each for each in layer_collectives(own)]
