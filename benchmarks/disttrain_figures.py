"""Simulate DistTrain figures 15 to 20: overall, orchestration, reordering, frozen modules.

The models are the recipes of MLLM-9B, -15B and -72B on A800 devices. No value is fitted or
measured. Every step is planned as in `train.py --dry-run` and simulated action by action, for the
replica group with the most loaded rank. Megatron-LM is as in section 8: tensor 8, LLM pipelines of
1, 2 and 10 stages, one stage each for encoder and generator, which are replicated on the eight
devices of a stage and divide the images of a microbatch. "FLOP ratio" has nodes in proportion to
FLOPs and the same search within them.

Megatron-LM uses the better of 1F1B and interleaved 1F1B. The FLOP ratio may use every schedule and
recomputation that torchmm may use. Each row shows whether both fit into 90 % of a device, by
simulated peak memory with messages. Baselines that do not fit are still shown. The torchmm plan is
never slower than the FLOP ratio, because this plan is one of its candidates.

The paper prints most bars only in figures, and ranges over models in the text. The minimum and
maximum are compared with these ranges. Throughput is that of the full job, whose number of devices
varies slightly. MFU is that of the devices in use. See recipes/papers/bases/disttrain.toml for the
replacements of U-Net and LAION-400M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from support.harness import Row, run_cases
from support.papers.baselines import ratio_shares, rigid_plan, sized_recipe

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.disttrain.orchestration.plan_space import PlanVariant
from torchmm.balance.disttrain.orchestration.search import OrchestrationPlan
from torchmm.balance.recipe_simulation.step_simulator import (
    SimulatedStepReport,
    StepSample,
    StepSimulator,
)
from torchmm.balance.search.disaggregated import plan_variants
from torchmm.balance.search.plan_search import search_plans
from torchmm.balance.search.result import PlanSearchResult, SimulatedPlan, fits
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

RECIPES = Path(__file__).parents[1] / "recipes" / "papers"
PROFILE = load_profile("a800_disttrain")
MODELS = {"9b": 1, "15b": 2, "72b": 10}
"""Pipeline ranks of the LLM under Megatron-LM."""
LARGE = 1296, dict.fromkeys(MODELS, 1920)
SMALL = 96, {"9b": 128, "15b": 64, "72b": 40}
"""Devices ("up to" 1296, and up to 98) and global batches of §8.1 and §8.2."""
TENSOR = 8
PARTS = ("vision", "llm", "generator")
FROZEN = {
    "only projectors": PARTS,
    "encoder": ("llm", "generator"),
    "LLM": ("vision", "generator"),
    "generator": ("vision", "llm"),
}
"""By what is trained in addition to the projectors: what is not (§8.3.1)."""
VIRTUAL_STAGES = (1, 2, 4)
EFFORT = {LARGE[0]: 150_000, SMALL[0]: 100_000}
"""Actions to simulate in a search, by devices."""


class Step(NamedTuple):
    """Simulated step of a complete job."""

    seconds: float
    mfu: float
    devices: int
    fits: bool
    peak_gib: float

    @classmethod
    def of(cls, forecast: SimulatedStepReport, devices: int) -> Step:
        """Return the step of a forecast. The forecast must have a step."""
        step = forecast.step
        assert step is not None, forecast.problem
        seconds = forecast.iteration_ms / 1e3
        return cls(seconds, forecast.mfu, devices, fits(step), max(step.peak_bytes) / 2**30)


@dataclass(frozen=True)
class Case:
    """Model on a cluster.

    Attributes:
        name: Name of the recipe.
        frozen: Modules that are not trained.
    """

    name: str
    devices: int
    batch: int
    frozen: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """Return the recipe of the model with this batch and these frozen modules."""
        changes = ["--training.global_batch_size", str(self.batch)]
        changes += ["--freeze.modules", str(list(self.frozen))]
        return load_recipe(RECIPES / f"disttrain_mllm_{self.name}.toml", changes).recipe


@cache
def sample_of(case: Case) -> StepSample:
    """Return the model and the global batch."""
    return StepSample(case.recipe)


@cache
def variants_of(case: Case) -> list[PlanVariant]:
    """Return schedules and recomputation modes with their costs."""
    return plan_variants(case.recipe, case.devices, PROFILE, sample_of(case))


@cache
def judged(case: Case, ratio: bool) -> PlanSearchResult:
    """Search all disaggregated plans, or those with nodes in proportion to FLOPs."""
    return search_plans(
        case.recipe,
        case.devices,
        PROFILE,
        methods=("disaggregated",),
        budget_s=inf,
        max_actions=EFFORT.get(case.devices, min(EFFORT.values())),
        limits=ratio_shares(variants_of(case)[0].problem) if ratio else None,
        sample=sample_of(case),
    )


def best_of(case: Case) -> SimulatedPlan:
    """Return the best plan, which may be a plan of the FLOP ratio."""
    found = [judged(case, ratio).best for ratio in ((False, True) if not case.frozen else (False,))]
    return min((each for each in found if each is not None), key=lambda each: each.step_ms)


def ours(case: Case, reorder: str | None = None) -> Step:
    """Return the step of the best plan, optionally with a different `data.reorder`."""
    best = best_of(case)
    if reorder is None:
        return Step.of(best.report, best.devices)
    data = best.recipe.data.model_copy(update={"reorder": reorder})
    return run(case, best.recipe.model_copy(update={"data": data}), best.devices)


def flop_ratio(case: Case) -> Step:
    """Return the step with nodes in proportion to FLOPs."""
    best = judged(case, True).best
    assert best is not None
    return Step.of(best.report, best.devices)


@cache
def megatron(case: Case) -> Step:
    """Return the step of Megatron-LM, with images divided among the devices of a stage."""
    problem = variants_of(case)[0].problem
    plan = rigid_plan(problem, TENSOR, MODELS[case.name])
    steps = []
    for stages in VIRTUAL_STAGES if MODELS[case.name] > 1 else (1,):
        own = sized_recipe(
            case.recipe,
            {unit.name: unit.sizes for unit in plan.units},
            schedule="interleaved_1f1b" if stages > 1 else "1f1b",
            stages=stages,
        )
        steps.append(run(case, copied_in_stages(own, plan), plan.devices))
    return min(steps, key=lambda step: (not step.fits, step.seconds))


def copied_in_stages(recipe: Recipe, plan: OrchestrationPlan) -> Recipe:
    """Return a recipe with encoder and generator replicated on all devices of their stages."""
    table = recipe.model_dump(exclude_none=True)
    for unit in plan.units:
        if unit.name != "llm":
            table["parallel"][unit.name] |= {
                "tensor": 1, "shard": unit.sizes.data * TENSOR, "sub_microbatch_images": 1,
            }  # fmt: skip
    table["data"]["reorder"] = "none"
    return Recipe.model_validate(table)


def run(case: Case, recipe: Recipe, devices: int) -> Step:
    """Return the step of a recipe with modules on separate devices."""
    forecaster = StepSimulator(recipe, devices, PROFILE, sample=sample_of(case))
    return Step.of(forecaster.simulate_parallel(recipe.parallel), devices)


def overall_rows(names: Sequence[str]) -> list[Row]:
    """Return the rows of figures 15 and 16."""
    rows = []
    gains: dict[str, list[float]] = {"MFU": [], "throughput": []}
    for name in names:
        case = Case(name, LARGE[0], LARGE[1][name])
        found, baseline = ours(case), megatron(case)
        title = f"Fig. 15/16, {title_of(case)}"
        rows += step_rows(title, found, baseline, 54.7 if name == "72b" else None)
        rows.append(certificate_row(title, case))
        ratios = found.mfu / baseline.mfu, baseline.seconds / found.seconds
        if name == "72b":
            rows += [
                row(title, "MFU over Megatron-LM", "x", ratios[0], paper=1.2),
                row(title, "throughput over Megatron-LM", "x", ratios[1], paper=1.3),
            ]
        else:
            gains["MFU"].append(ratios[0])
            gains["throughput"].append(ratios[1])
    rows += range_rows("Fig. 15, 9B and 15B", "MFU over Megatron-LM", gains["MFU"], 1.7, 2.8)
    rows += range_rows(
        "Fig. 16, 9B and 15B", "throughput over Megatron-LM", gains["throughput"], 1.7, 2.2
    )
    return rows


def orchestration_rows(names: Sequence[str]) -> list[Row]:
    """Return the rows of figure 17."""
    rows, mfu, throughput = [], [], []
    for name in names:
        case = Case(name, SMALL[0], SMALL[1][name])
        found = ours(case)
        rows.append(certificate_row(f"Fig. 17, {title_of(case)}", case))
        for rival, step in (("Megatron-LM", megatron(case)), ("FLOP ratio", flop_ratio(case))):
            rows += step_rows(f"Fig. 17, {title_of(case)}, against {rival}", found, step, None)
            mfu.append(found.mfu / step.mfu)
            throughput.append(step.seconds / found.seconds)
    rows += range_rows("Fig. 17, all", "MFU over baselines", mfu, 1.3, 2.7)
    return rows + range_rows("Fig. 17, all", "throughput over baselines", throughput, 1.4, 2.7)


def reordering_rows(names: Sequence[str]) -> list[Row]:
    """Return the rows of figure 18."""
    rows, gains = [], []
    for name in names:
        case = Case(name, SMALL[0], SMALL[1][name])
        steps = {mode: ours(case, mode) for mode in ("none", "intra", "inter", "both")}
        title = f"Fig. 18, {title_of(case)}"
        rows += [
            row(title, f"throughput, {mode} over random order", "x", steps["none"].seconds / s)
            for mode in ("intra", "inter", "both")
            for s in [steps[mode].seconds]
        ]
        gains.append(steps["none"].seconds / steps["both"].seconds)
    return rows + range_rows("Fig. 18, all", "throughput over random order", gains, 1.03, 1.11)


def frozen_rows(names: Sequence[str]) -> list[Row]:
    """Return the rows of figures 19 and 20."""
    rows, mfu, throughput = [], [], []
    for name in names:
        for trained, frozen in FROZEN.items():
            case = Case(name, SMALL[0], SMALL[1][name], tuple(frozen))
            found, step = ours(case), megatron(case)
            rows += step_rows(f"Fig. 19/20, {title_of(case)}, {trained}", found, step, None)
            mfu.append(found.mfu / step.mfu)
            throughput.append(step.seconds / found.seconds)
    rows += range_rows("Fig. 19, all", "MFU over Megatron-LM", mfu, 1.4, 2.9)
    return rows + range_rows("Fig. 20, all", "throughput over Megatron-LM", throughput, 1.2, 2.9)


def title_of(case: Case) -> str:
    """Return the title of a case."""
    return f"MLLM-{case.name.upper()}, batch {case.batch}"


def step_rows(title: str, found: Step, baseline: Step, paper_mfu: float | None) -> list[Row]:
    """Return MFU, time and memory of torchmm and the baseline."""
    devices = f"{found.devices} and {baseline.devices} devices"
    fit = ["fits" if step.fits else "does NOT fit" for step in (found, baseline)]
    return [
        Row(title, f"MFU, {devices}", "%", 100 * found.mfu, 100 * baseline.mfu, paper_mfu,
            kind="simulated"),
        Row(title, "step", "s", found.seconds, baseline.seconds, None, None, "lower", "simulated"),
        Row(title, f"peak: torchmm {fit[0]}, baseline {fit[1]}", "GiB", found.peak_gib,
            baseline.peak_gib, None, None, "lower", "simulated"),
    ]  # fmt: skip


def certificate_row(title: str, case: Case) -> Row:
    """Return a bound on the distance of the torchmm plan from the best of all plans."""
    best, found = best_of(case), judged(case, False)
    gap = 100 * (best.step_ms / min(found.bound_ms, best.step_ms) - 1)
    return Row(title, "torchmm slower than any plan, at most", "%", gap, better="lower",
               kind="simulated")  # fmt: skip


def row(title: str, metric: str, unit: str, value: float, paper: float | None = None) -> Row:
    """Return a ratio whose baseline is 1."""
    return Row(title, metric, unit, value, 1.0, paper, kind="simulated")


def range_rows(
    title: str, metric: str, gains: Sequence[float], least: float, most: float
) -> list[Row]:
    """Return the minimum and the maximum of a range, or no rows if it is empty."""
    if not gains:
        return []
    return [
        row(title, f"{metric}, minimum", "x", min(gains), least),
        row(title, f"{metric}, maximum", "x", max(gains), most),
    ]


FIGURES: dict[str, Callable[[Sequence[str]], list[Row]]] = {
    "orchestration": orchestration_rows,
    "reordering": reordering_rows,
    "frozen": frozen_rows,
    "overall": overall_rows,
}


def figure(name: str, size: str) -> Iterator[list[Row]]:
    """Yield the rows of a figure; short runs have one model and one search.

    Frozen modules are simulated for the smallest and the largest model, which give both ends of
    the range.
    """
    names = [each for each in MODELS if each != "15b" or name != "frozen"]
    names = names if size == "full" else ["9b"]
    if size == "full" or name in ("orchestration", "reordering"):
        yield FIGURES[name](names)


CASES = {name: partial(figure, name) for name in FIGURES}


def main() -> None:
    """Print the tables."""
    run_cases("DistTrain figures", __doc__, CASES, "simulated")


if __name__ == "__main__":
    main()
