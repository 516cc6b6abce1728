"""Claims of Entrain and BigMac, compared with searched schedules in the simulator.

    python benchmarks/newer_systems.py [--quick] [--json FILE]

Only the abstracts of both papers were available, so neither system is implemented. Models and data
are those of PipeWeaver recipes. No value is fitted.

    Entrain (arXiv 2605.27918)   A static schedule suffices, because samples are deferred within an
                                 iteration until all microbatches have the same cost.
    BigMac (arXiv 2605.25451)    Encoders nested into the LLM pipeline use constant activation
                                 memory for any batch size, at the speed of unlimited memory.

The bound for Entrain is the balanced single pipeline under (interleaved) 1F1B with its best number
of stages per rank. The images of the batch are distributed evenly over the microbatches, which no
deferral of complete samples can exceed. For BigMac, the benchmark reports encoder activations for
growing batches, and step time relative to unlimited memory. "Bounded" allows twice as many
microbatches in flight as ranks (the separated schedule). "Searched within this memory" searches
with the memory of "bounded" as its limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from support.harness import Row, describe_machine, make_parser, report

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, search_orders
from torchmm.balance.recipe_simulation.first_microbatches import Workload
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.balance.step_plans import compute_search_costs
from torchmm.common.batch import MicrobatchMeta
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.separated import separated
from torchmm.planning.step import step_graph
from torchmm.recipe.read import load_recipe

RECIPES = Path(__file__).parent.parent / "recipes" / "papers"
SEED = 0
STAGES = (1, 2, 4)
"""Per rank, tried for static chains."""
SEGMENTS = ("--parallel.vision.segments=1", "--parallel.vision.sub_microbatch_images=12")
FIRST, UNLIMITED, BOUNDED, WITHIN = (
    "encoders first", "searched, unlimited", "bounded", "searched within this memory",
)  # fmt: skip


class Model(NamedTuple):
    """Recipe and number of devices of one pipeline."""

    name: str
    gpus: int


MODELS = (Model("pipeweaver_vlm_s", 16), Model("pipeweaver_vlm_m", 32))


def forecaster_of(
    model: Model, microbatches: int, evaluations: int, seed: int, *more: str
) -> StepSimulator:
    """Return the forecaster of the first step of a recipe."""
    changes = [f"--training.global_batch_size={microbatches}", f"--simulation.seed={seed}"]
    changes += ["--parallel.schedule=searched", f"--parallel.search.evaluations={evaluations}"]
    recipe = load_recipe(RECIPES / f"{model.name}.toml", [*changes, *more], model.gpus).recipe
    return StepSimulator(recipe, model.gpus, load_profile(recipe.simulation.device))


def alike(metas: Sequence[MicrobatchMeta]) -> list[MicrobatchMeta]:
    """Distribute the images and tokens evenly over the same number of microbatches."""
    samples = [sample for meta in metas for sample in meta.samples]
    images = (image for sample in samples for image in sample.images)
    encoder = next((sample.encoder for sample in samples if sample.images), None)
    total = sum(len(sample.images) for sample in samples)
    found = []
    for index, meta in enumerate(metas):
        count = total * (index + 1) // len(metas) - total * index // len(metas)
        own = tuple(islice(images, count))
        sample = replace(
            meta.samples[0], tokens=meta.tokens, images=own, encoder=encoder if own else None
        )
        found.append(MicrobatchMeta((sample,), meta.tokens))
    return found


def static_ms(forecaster: StepSimulator, metas: Sequence[MicrobatchMeta]) -> float:
    """Return the step time of the balanced single pipeline with the best stages per rank."""
    forecaster.workload = Workload(list(metas), 1.0)
    found = []
    for stages in STAGES:
        sizes = {"schedule": "megatron_balanced", "virtual_stages": stages}
        made = forecaster.simulate_parallel(forecaster.recipe.parallel.model_copy(update=sizes))
        if made.step is not None and made.step.fits:
            found.append(made.iteration_ms)
    return min(found)


def deferral_rows(model: Model, microbatches: int, evaluations: int, seeds: int) -> list[Row]:
    """Compare a static schedule, also with identical microbatches, and searched schedules."""
    came, even, ours = [], [], []
    for seed in range(SEED, SEED + seeds):
        forecaster = forecaster_of(model, microbatches, evaluations, seed)
        metas = forecaster.workload.microbatches
        ours.append(forecaster.simulate_schedule().iteration_ms)
        came.append(static_ms(forecaster, metas))
        even.append(static_ms(forecaster, alike(metas)))
    case = f"{model.name}, {model.gpus} GPUs, {microbatches} microbatches, {seeds} seeds"

    def row(metric: str, ratios: Sequence[float]) -> Row:
        return Row(case, metric, "x", float(np.mean(ratios)), 1.0, kind="simulated")

    ratios = [theirs / own for theirs, own in zip(even, ours, strict=True)]
    return [
        row("static schedule / searched", np.divide(came, ours).tolist()),
        row("static schedule / the same, identical microbatches", np.divide(came, even).tolist()),
        row("static schedule, identical microbatches (bound of deferral) / searched", ratios),
        row("the same, minimum over seeds", [min(ratios)]),
    ]


def bounded_orders(
    forecaster: StepSimulator, evaluations: int
) -> Iterator[tuple[str, SimulatedStep]]:
    """Return rows about the step time of one batch for several memory limits."""
    metas, modules = forecaster.workload.microbatches, forecaster.modules
    parallel = forecaster.recipe.parallel
    layout = forecaster.layout(parallel)
    graph = step_graph(layout, parallel, metas)
    found = compute_search_costs(graph, modules, metas, forecaster._costs(parallel))
    costs = replace(found, memory_limit_bytes=None)

    def simulated(order: ComputeOrder) -> SimulatedStep:
        return simulate(lower_plan(order, graph, {}), costs)

    def searched(dispatcher: Dispatcher, least: ComputeOrder | None = None) -> ComputeOrder:
        result = search_orders(dispatcher, SearchBudget(evaluations), seed=SEED)
        if result.fits:
            return dispatcher.dispatch(result.order).order
        assert least is not None
        return least

    dispatcher = Dispatcher(graph, costs)
    llm_last = sorted(
        range(len(dispatcher.segments)), key=lambda i: dispatcher.segments[i].module == "llm"
    )
    yield FIRST, simulated(dispatcher.dispatch(np.array(llm_last, np.uint32)).order)
    yield UNLIMITED, simulated(searched(dispatcher))
    order = separated(graph, lambda action: costs.compute_ms[action])
    bounded = simulated(order)
    yield BOUNDED, bounded
    limit = max(bounded.peak_bytes)
    yield (
        WITHIN,
        simulated(searched(Dispatcher(graph, replace(costs, memory_limit_bytes=limit)), order)),
    )


def nested_rows(model: Model, sizes: Sequence[int], evaluations: int) -> list[Row]:
    """Return encoder activations and step time for growing batches."""
    rows = []
    kept: dict[str, list[float]] = {}
    for microbatches in sizes:
        more = (*SEGMENTS, "--parallel.virtual_stages=2")
        forecaster = forecaster_of(model, microbatches, evaluations, SEED, *more)
        steps = dict(bounded_orders(forecaster, evaluations))
        ideal_ms = steps[UNLIMITED].makespan_ms
        case = f"{model.name}, {model.gpus} GPUs, {microbatches} microbatches"
        for name, step in steps.items():
            kept_gib = max(step.saved_bytes(("vision",))) / 2**30
            kept.setdefault(name, []).append(kept_gib)
            rows += [
                Row(case, f"encoder activations, {name}", "GiB", kept_gib, better="lower",
                    kind="simulated"),
                Row(case, f"step / step of unlimited search, {name}", "x",
                    step.makespan_ms / ideal_ms, 1.0, better="lower", kind="simulated"),
            ]  # fmt: skip
    case = f"{model.name}, {sizes[-1]} microbatches / {sizes[0]}"
    rows += [
        Row(case, f"encoder activations, {name}", "x", own[-1] / own[0], 1.0, better="lower",
            kind="simulated")
        for name, own in kept.items()
    ]  # fmt: skip
    return rows


def main() -> None:
    """Print the table."""
    arguments = make_parser((__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    quick: bool = arguments.quick
    models, evaluations = (MODELS[:1], 100) if quick else (MODELS, 2000)
    rows = []
    for model in models:
        rows += deferral_rows(model, 8 if quick else 24, evaluations, 1 if quick else 5)
        rows += nested_rows(model, (4, 8) if quick else (8, 16, 32, 64), evaluations)
    machine = describe_machine(torch.device("cpu"))
    report(f"Newer systems, seed {SEED}; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
