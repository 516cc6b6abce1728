"""PipeWeaver's ablation (table 5) and sub-microbatch sizes (figure 10), in simulation.

    python benchmarks/pipeweaver_figures.py [--quick] [--json FILE]

VLM-S (ViT 5B + Llama3 8B, TP 4, PP 4, 16 H800) on 32 microbatches of 8192 tokens; image counts are
ours, drawn with the printed seed. Technique after technique, as in the paper:

1. Vanilla Megatron-LM: all layers in one chain of virtual stages with equal numbers of parameters,
   interleaved 1F1B; a microbatch's images together.
2. Modality-aware partitioner: every module in segments of its own on all ranks, a stage takes a
   microbatch's groups of images one behind the other, still interleaved 1F1B.
3. Stage interleaving: the dispatcher, segments in natural order.
4. Ranking: the order of segments is searched.
5. Layer tuning: recomputation chosen per layer and microbatch up to the memory limit.

Rows 1 to 4 recompute everything, as the paper's baseline does not print what it recomputes; a
second table has the best fixed mode of each module that fits instead. The paper prints neither
virtual stages, microbatches nor memory limit; seconds are therefore compared as ratios to the first
row. The cost model is not calibrated: nothing was measured on an H800.

Figure 9b: 40 iterations with rising and falling numbers of images, modules cut once for typical
data. *static plan*: the chain cut into equally costly stages (the paper's nnScaler*); *encoders
first*: all encoder segments before the LLM's (its Optimus, coarse); *no search*: row 2. Printed
are: Megatron-LM 52.9 % slower at iteration 6, Optimus and nnScaler 10.4 % in iterations 1 to 10,
nnScaler 50.5 % in iterations 15 to 20. How image counts fall is not; here both bounds do so evenly.

Figure 10: for each size of sub-microbatches the best order that is found, and the worst: the
longest of as many random orders as the search tries, which is less bad than the paper's worst, for
which a search was inverted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from harness import Row, describe_machine, make_parser, report
from paper_figures import PIPEWEAVER_ABLATION

from torchmm.balance.cost_model import CostModel
from torchmm.balance.dispatch import Dispatcher
from torchmm.balance.execution import Recompute, stage_parameters
from torchmm.balance.layer_costs import module_layers
from torchmm.balance.layer_tuning import LayerTuning, tune_layers
from torchmm.balance.plan_costs import PlanCosts, plan_costs
from torchmm.balance.profiles import load_profile
from torchmm.balance.recompute_costs import LAYER_MODES
from torchmm.balance.search import Budget, search
from torchmm.balance.simulator import simulate
from torchmm.balance.workload import draw_microbatches
from torchmm.config import ParallelConfig
from torchmm.config_simulation import SimulatedSequences
from torchmm.forecast import Forecaster
from torchmm.module_costs import module_executions
from torchmm.pipelining.classic import interleaved_1f1b
from torchmm.pipelining.graph import StageGraph, StageLayout
from torchmm.pipelining.layouts import megatron_balanced_layout
from torchmm.pipelining.lowering import lower_plan
from torchmm.pipelining.plan import ComputeOrder, PipelinePlan
from torchmm.pipelining.validation import validate_plan
from torchmm.recipe import load_recipe
from torchmm.segment_choice import with_segments
from torchmm.step_plan import plan_layout, step_graph

ROOT = Path(__file__).parent.parent
GPUS, RANKS, MICROBATCHES, SEED = 16, 4, 32, 0
VIRTUAL_STAGES = 4
"""Of Megatron-LM, per rank."""
MEMORY_SHARE = 0.85
SIZES = (4, 8, 12, 16, 24, 32)
Modes = tuple[Recompute, ...]


class Setting:
    """VLM-S, its microbatches, and costs for any modes of recomputation."""

    def __init__(self, microbatches: int, images: int | None = None) -> None:
        given = ["--parallel.schedule", "searched"]
        given += ["--training.global_batch_size", str(microbatches)]
        given += ["--simulation.seed", str(SEED)]
        if images is not None:
            given += ["--parallel.vision.sub_microbatch_images", str(images)]
        path = ROOT / "recipes/papers/pipeweaver_vlm_s.toml"
        self.recipe = load_recipe(path, given).recipe
        self.profile = load_profile(self.recipe.simulation.device)
        forecaster = Forecaster(self.recipe, GPUS, self.profile)
        self.modules, self.metas = forecaster.modules, forecaster.workload.microbatches
        self.typical = self.metas
        """Microbatches by whose sizes modules are cut."""
        self._executions = module_executions(
            self.recipe.parallel,
            self.recipe.activation_checkpoint,
            self.modules,
            forecaster.ranks,
            forecaster.units,
        )
        self.parallel: ParallelConfig = with_segments(
            self.recipe, self.modules, self.metas, self.profile
        )

    @property
    def limit_bytes(self) -> int:
        return round(MEMORY_SHARE * self.profile.device.memory_bytes)

    def model(self, modes: Sequence[Recompute]) -> CostModel:
        executions = {
            module.name: replace(self._executions[module.name], recompute=mode)
            for module, mode in zip(self.modules, modes, strict=True)
        }
        return CostModel(self.profile, self.recipe.training.dtype, executions)

    def costs(self, graph: StageGraph, modes: Sequence[Recompute]) -> PlanCosts:
        found = plan_costs(graph, self.modules, self.metas, self.model(modes))
        return replace(found, memory_limit_bytes=self.limit_bytes)

    def megatron(self) -> StageGraph:
        """One chain with equal numbers of parameters per virtual stage, whole microbatches."""
        layers = []
        typical = module_layers(self.modules, self.typical)
        for own, module in zip(typical, self.modules, strict=True):
            count = len(module.layers)
            parameters = [stage_parameters(module, i, i + 1).all for i in range(count)]
            layers.append(replace(own, costs=tuple(parameters), pre_cost=0.0, post_cost=0.0))
        return self._chain(megatron_balanced_layout(layers, RANKS, VIRTUAL_STAGES))

    def separated(self) -> StageGraph:
        """Every module in segments of its own, in the partitioner's sub-microbatches."""
        layout: StageLayout = plan_layout(self.parallel, self.modules, self.typical)
        return step_graph(layout, self.parallel, self.metas)

    def static(self) -> StageGraph:
        """One chain of equally costly virtual stages, for typical microbatches: a static plan."""
        layers = module_layers(self.modules, self.typical)
        return self._chain(megatron_balanced_layout(layers, RANKS, VIRTUAL_STAGES))

    def _chain(self, layout: StageLayout) -> StageGraph:
        counts = tuple(int(meta.images_of("vision") > 0) for meta in self.metas)
        return StageGraph(layout, len(self.metas), {"vision": counts})

    def with_images(self, least: int, most: int, seed: int) -> Setting:
        """The same, cut as before, for microbatches with other numbers of images."""
        simulation = self.recipe.simulation.model_copy(
            update={"sequences": [SimulatedSequences(images=[least, most])], "seed": seed}
        )
        other = copy(self)
        length = self.recipe.training.sequence_length
        other.metas = draw_microbatches(simulation, len(self.metas), sequence_length=length)
        return other


class Timed(NamedTuple):
    """A simulated step."""

    ms: float
    peak_bytes: int
    bubbles: float


def lowered(graph: StageGraph, order: ComputeOrder) -> PipelinePlan:
    """A plan without messages' sizes, checked."""
    plan = lower_plan(order, graph, {})
    validate_plan(plan).raise_for_problems()
    return plan


def timed(plan: PipelinePlan, costs: PlanCosts) -> Timed:
    """Time, peak of the fullest rank, share of bubbles between (not inside of) actions."""
    step = simulate(plan, costs)
    shares = step.timeline.bubble_share
    return Timed(step.makespan_ms, max(step.peak_bytes), sum(shares.values()) - shares["tp"])


def ladder(setting: Setting, modes: Modes, evaluations: int) -> Iterator[tuple[str, Timed]]:
    """Technique after technique; without those that run out of memory half-way."""
    chain, graph = setting.megatron(), setting.separated()
    names = list(PIPEWEAVER_ABLATION)
    yield names[0], timed(lowered(chain, interleaved_1f1b(chain)), setting.costs(chain, modes))
    costs = setting.costs(graph, modes)
    yield names[1], timed(lowered(graph, interleaved_1f1b(graph)), costs)
    dispatcher = Dispatcher(graph, costs)
    natural = dispatcher.dispatch()
    if natural.feasible:
        yield names[2], timed(lowered(graph, natural.order), costs)
    found = search(dispatcher, Budget(evaluations=evaluations), seed=SEED)
    if not found.fits:
        return
    plan = lowered(graph, dispatcher.dispatch(found.order).order)
    yield names[3], timed(plan, costs)
    everything = setting.model(("none",) * len(setting.modules))
    tuning = LayerTuning(
        everything, frozenset(m.name for m in setting.modules), setting.limit_bytes
    )
    tuned = tune_layers(plan, setting.modules, setting.metas, tuning)
    yield names[4], timed(tuned.plan, tuned.costs)


def best_fixed(setting: Setting, evaluations: int) -> dict[str, Timed]:
    """Of each technique, the fastest with one mode for each module that fits into memory."""
    best: dict[str, Timed] = {}
    for modes in product(LAYER_MODES, repeat=len(setting.modules)):
        for name, found in ladder(setting, modes, evaluations):
            fits = found.peak_bytes <= setting.limit_bytes
            if fits and (name not in best or found.ms < best[name].ms):
                best[name] = found
    return best


def ablation_rows(setting: Setting, evaluations: int, *, fixed: bool) -> list[Row]:
    """Table 5."""
    full = dict(ladder(setting, ("full",) * len(setting.modules), evaluations))
    tables = {"everything recomputed": full}
    if fixed:
        tables["best fixed modes"] = best_fixed(setting, evaluations)
    rows = []
    for label, found in tables.items():
        first = found["Megatron-LM"]
        for name, printed in PIPEWEAVER_ABLATION.items():
            step = found[name]
            case = f"table 5, {label}: {name}"
            rows += [
                Row(case, "step", "s", step.ms / 1e3, None, printed.seconds.value, better="lower",
                    kind="simulated"),
                Row(case, "speed-up over Megatron-LM", "x", first.ms / step.ms, 1.0,
                    1 + printed.gain.value, kind="simulated"),
                Row(case, "bubbles", "share", step.bubbles, better="lower", kind="simulated"),
                Row(case, "memory of the limit", "share", step.peak_bytes / setting.limit_bytes,
                    better="lower", kind="simulated"),
            ]  # fmt: skip
    return rows


def size_rows(microbatches: int, sizes: Sequence[int], evaluations: int) -> list[Row]:
    """Figure 10: the best and the worst order by size of sub-microbatches, relative to 12."""
    best, worst = {}, {}
    for size in sizes:
        setting = Setting(microbatches, size)
        graph = setting.separated()
        dispatcher = Dispatcher(graph, setting.costs(graph, ("full",) * len(setting.modules)))
        found = search(dispatcher, Budget(evaluations=evaluations), seed=SEED)
        best[size] = found.makespan_ms
        rng, longest = np.random.default_rng(SEED), found.natural_ms
        for _ in range(evaluations):
            order = rng.permutation(len(dispatcher.segments)).astype(np.uint32)
            time_ms = dispatcher.evaluate(order)
            longest = max(longest, time_ms) if time_ms < float("inf") else longest
        worst[size] = longest
    rows = []
    printed = {sizes[0]: 0.051, sizes[-1]: 0.154}
    for size in sizes:
        case = f"figure 10, {size} images"
        rows += [
            Row(case, "best step", "s", best[size] / 1e3, better="lower", kind="simulated"),
            Row(case, "against 12 images", "x", best[size] / best[12], 1.0,
                1.121 if size == 4 else None, better="lower", kind="simulated"),
            Row(case, "worst order longer by", "share", worst[size] / best[size] - 1, None,
                printed.get(size), better="lower", kind="simulated"),
        ]  # fmt: skip
    return rows


def bounds_by_iteration() -> list[tuple[int, int]]:
    """Least and most images of 40 iterations: twice up within 5, then down to none within 15."""
    rising = [(4 * i, 32) for i in range(5)]
    falling = [(round(16 * (14 - i) / 15), round(32 * (14 - i) / 14)) for i in range(15)]
    return 2 * (rising + falling)


def systems(setting: Setting, evaluations: int) -> dict[str, float]:
    """Milliseconds of one step by system; everything recomputed but where it is tuned."""
    full: Modes = ("full",) * len(setting.modules)
    found = {}
    for name, graph in (("Megatron-LM", setting.megatron()), ("static plan", setting.static())):
        plan = lowered(graph, interleaved_1f1b(graph))
        found[name] = timed(plan, setting.costs(graph, full)).ms
    steps = {name: step.ms for name, step in ladder(setting, full, evaluations)}
    found["no search"] = steps["+ partitioner"]
    graph = setting.separated()
    dispatcher = Dispatcher(graph, setting.costs(graph, full))
    modules = {own.module for own in dispatcher.segments}
    first = sorted(
        range(len(dispatcher.segments)), key=lambda i: dispatcher.segments[i].module == "llm"
    )
    coarse = dispatcher.dispatch(np.array(first, np.uint32)) if len(modules) > 1 else None
    if coarse is not None and coarse.feasible:
        found["encoders first"] = timed(lowered(graph, coarse.order), dispatcher.costs).ms
    found["searched"], found["tuned"] = steps["+ module ranking"], steps["+ layer tuning"]
    return found


def dynamic_rows(setting: Setting, every: int, evaluations: int) -> list[Row]:
    """Figure 9b: rising and falling numbers of images; times relative to ours."""
    groups: dict[str, list[dict[str, float]]] = {}
    for index, (least, most) in enumerate(bounds_by_iteration()):
        if (index - 5) % every:
            continue
        step = systems(setting.with_images(least, most, SEED + index), evaluations)
        phases = ["iterations 1-10" if index % 20 < 10 else "iterations 11-20"]
        phases += ["iteration 6"] * (index == 5) + ["iterations 15-20"] * (index % 20 >= 14)
        for phase in phases:
            groups.setdefault(phase, []).append(step)
    printed = {
        ("iteration 6", "Megatron-LM"): 1.529,
        ("iterations 1-10", "encoders first"): 1.104,
        ("iterations 1-10", "static plan"): 1.104,
        ("iterations 15-20", "static plan"): 1.505,
    }
    rows = []
    for phase, steps in groups.items():
        for name in ("Megatron-LM", "static plan", "encoders first", "no search", "searched"):
            ratios = [step[name] / step["tuned"] for step in steps if name in step]
            if ratios:
                rows.append(
                    Row(f"figure 9b, {phase}: {name}", "mean step against tuned", "x",
                        fmean(ratios), 1.0, printed.get((phase, name)), better="lower",
                        kind="simulated")
                )  # fmt: skip
    return rows


def main() -> None:
    """Prints the tables."""
    arguments = make_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    quick: bool = arguments.quick
    count, evaluations = (16, 200) if quick else (MICROBATCHES, 4000)
    rows = ablation_rows(Setting(count), evaluations, fixed=not quick)
    rows += size_rows(count, (4, 12, 32) if quick else SIZES, evaluations)
    rows += dynamic_rows(Setting(count), 10 if quick else 1, evaluations // 4)
    machine = describe_machine(torch.device("cpu"))
    report(f"PipeWeaver, VLM-S, {count} microbatches, seed {SEED}; {machine}", rows, arguments.json)


if __name__ == "__main__":
    main()
