"""CPU time of planning on every training rank in the largest jobs of DistTrain.

The step is that of MLLM-15B on 1,290 devices, with the parallelism degrees that
`benchmarks/disttrain_figures.py` finds. Two methods are compared:

- In place: a rank arranges the global batch. Then it schedules, lowers and checks the programs of
  all ranks of its replica group.
- Background: separate processes do this work. The training rank receives its part of the step and
  the plan, compares the inputs of the plan, and reads its program.

The CPU time of the processes is a separate row. All values are the minimum CPU time of many
repetitions in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

from support.harness import Row
from support.papers.baselines import sized_recipe
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.disttrain.arrangement import build_step_reorder
from torchmm.balance.disttrain.orchestration.search import UnitSizes
from torchmm.balance.pipeweaver.background.planning_worker import plan_synchronously
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.run_costs import build_cost_model, build_layer_tuning
from torchmm.balance.step_plans import plan_step_with_costs
from torchmm.common.batch import MicrobatchMeta, SequenceAssignment
from torchmm.common.dtypes import DTYPES
from torchmm.data.items import Item, microbatch_meta
from torchmm.pipelining.plan.serialization import decode_plan
from torchmm.pipelining.run.messages import message_sizes, message_specs
from torchmm.planning.step import step_graph
from torchmm.recipe.read import load_recipe
from torchmm.training.pipeline import local_tasks
from torchmm.training.planners.sharing import plan_input_digest

RECIPE = Path(__file__).parents[3] / "recipes" / "papers" / "disttrain_mllm_15b.toml"
SIZES = {
    "vision": UnitSizes(1, 15, 2),
    "llm": UnitSizes(4, 15, 20),
    "generator": UnitSizes(2, 15, 2),
}
SCHEDULE, RECOMPUTE = "zero_bubble", "auto"


class _Job(NamedTuple):
    setup: PlanningSetup
    metas: tuple[MicrobatchMeta, ...]
    """Number per replica group."""
    packs: list[list[Item]]
    """Number in the global batch."""
    forecaster: StepSimulator
    step_ms: float
    """Simulated."""


@cache
def job() -> _Job:
    """Return the recipe with these sizes."""
    base = load_recipe(RECIPE, []).recipe
    recipe = sized_recipe(base, SIZES, schedule=SCHEDULE, recompute=RECOMPUTE)
    devices = sum(s.devices for s in SIZES.values())
    forecaster = StepSimulator(recipe, devices, load_profile("a800_disttrain"))
    parallel = recipe.parallel.model_copy(update={"pipeline": forecaster.run.llm.pipeline})
    metas = tuple(forecaster.workload.microbatches)
    model = build_cost_model(forecaster.run, forecaster.modules, forecaster.profile)
    sizes = {name: message_sizes(module) for name, module in forecaster.sample.layered.items()}
    setup = PlanningSetup(
        forecaster.layout(parallel),
        parallel,
        tuple(forecaster.modules),
        "step",
        None,
        sizes,
        DTYPES[recipe.training.dtype],
        build_layer_tuning(recipe, model, layerwise=False),
        reduces_early=True,
    )
    packs = [[Item(0, 0, sample) for sample in pack.samples] for pack in forecaster.sample.packs]
    return _Job(setup, metas, packs, forecaster, forecaster.simulate_schedule().iteration_ms)


def least_ms(function: Callable[[], object], repetitions: int) -> float:
    """Return the minimum CPU time of several calls in this thread."""
    best = float("inf")
    for _ in range(repetitions):
        begin_s = time.thread_time()
        function()
        best = min(best, time.thread_time() - begin_s)
    return best * 1e3


def rows(repetitions: int) -> list[Row]:
    """Return the rows of the results."""
    setup, metas, packs, forecaster, step_ms = job()
    request = PlanRequest(1, metas)
    planned = plan_synchronously(setup, request)
    graph = step_graph(setup.layout, setup.config, metas, setup.sharding)
    plan = decode_plan(planned.encoded_plan, graph, lambda graph: {})
    counts = [len(row) for row in plan.actions]
    case = (
        f"MLLM-15B, {forecaster.run.world_size} GPUs, {len(counts)} ranks in a plan of "
        f"{sum(counts)} actions"
    )
    most_loaded = counts.index(max(counts))
    model = build_cost_model(forecaster.run, forecaster.modules, forecaster.profile)
    recipe = forecaster.recipe
    reorder = build_step_reorder(forecaster.run, forecaster.modules, model, setup.layout)
    length = recipe.training.sequence_length

    def arrange() -> SequenceAssignment:
        return reorder([microbatch_meta([pack], length) for pack in packs])

    def plan_all() -> object:
        return plan_step_with_costs(
            setup.layout, setup.config, setup.modules, metas,
            specs=lambda graph: message_specs(graph, setup.sizes, metas, setup.dtype),
            sharding="step", reduces_early=True, tuning=setup.tuning,
        )  # fmt: skip

    def read() -> object:
        plan_input_digest("", metas)
        graph = step_graph(setup.layout, setup.config, metas, setup.sharding)
        plan = decode_plan(planned.encoded_plan, graph, lambda graph: {})
        tasks = local_tasks(plan, most_loaded)
        return message_specs(plan.graph, setup.sizes, metas, setup.dtype, tasks=tasks)

    places = arrange().places[0]
    share = bytes(ForkingPickler.dumps([packs[n] for microbatch in places for n in microbatch]))
    sent = bytes(ForkingPickler.dumps(planned))
    take_ms = least_ms(lambda: ForkingPickler.loads(sent), repetitions)
    arrange_ms, in_place_ms = (least_ms(each, repetitions) for each in (arrange, plan_all))
    read_ms = least_ms(read, repetitions)
    share_ms = least_ms(lambda: ForkingPickler.loads(share), repetitions)
    process_ms = least_ms(lambda: plan_synchronously(setup, request), repetitions)
    before_ms, after_ms = arrange_ms + in_place_ms, share_ms + read_ms + take_ms
    return [
        Row(case, "reordering the global batch, per rank", "ms", share_ms, arrange_ms,
            better="lower"),
        Row(case, "planning, leading rank", "ms", read_ms + take_ms, in_place_ms,
            better="lower"),
        Row(case, "planning, every other rank", "ms", read_ms, in_place_ms, better="lower"),
        Row(case, "both, fraction of a simulated step", "%", 100 * after_ms / step_ms,
            100 * before_ms / step_ms, better="lower"),
        Row(case, "background processes", "ms", arrange_ms + process_ms, better="lower"),
    ]  # fmt: skip
