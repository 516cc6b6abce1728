"""Ways of training a multimodal model, simulated on the same models, data and cluster.

    python benchmarks/head_to_head.py [--quick] [--json FILE] [--pictures DIRECTORY]

Megatron-LM (whole encoder before the LLM's first stage), Megatron-LM balanced (all layers in one
chain), Optimus (encoders in the LLM's bubbles: whole actions, as plans have them, and kernels in
bubbles inside of the LLM's layers too, as in the paper), PipeWeaver (segments of each module in a
searched order) and DistTrain (modules on devices of their own, microbatches reordered), and the
best combination of these three. They are timed by one simulator with one cost model: nothing is
fitted, and no device was measured. Models and data are those of the papers' recipes
(recipes/papers), each paper's with its own; the first two differ in how much microbatches differ.

Sizes: "printed" are the recipe's pipeline and tensor-parallel sizes, the same for all but
DistTrain, which chooses sizes itself. "chosen" lets the others choose too: the fastest that fits of
several pipeline and tensor-parallel sizes and stages per rank, on as many devices. Encoder plans,
PipeWeaver's segments and DistTrain's plans are chosen by simulation in both, by the planners of
runs. All may recompute, see `head_to_head_methods`.

A step that does not fit into memory is shown, but not counted as the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from support.cases.head_to_head_methods import (
    EFFORT,
    Result,
    Start,
    combined,
    disttrain,
    forecast,
    in_bubbles,
    key,
    noted,
)
from support.harness import (
    Row,
    describe_machine,
    kept_rows,
    make_parser,
    report,
    write_rows,
)
from support.papers.paper_cells import in_one_chain

from torchmm.balance.costs.profiles import Profile, load_profile
from torchmm.common.errors import ConfigError
from torchmm.pipelining.view.draw import Panel, timelines_svg
from torchmm.recipe.read import check_recipe, load_recipe
from torchmm.recipe.recipe import Recipe

RECIPES = Path(__file__).parent.parent / "recipes" / "papers"
BASELINE, WHOLE = "Megatron-LM balanced", "Optimus, whole actions"
WHICH = ("printed", "chosen")
METHODS = ("Megatron-LM", BASELINE, WHOLE, "Optimus", "PipeWeaver", "DistTrain")
TENSOR, PIPELINE, VIRTUAL_STAGES = (1, 2, 4, 8), (4, 8, 16), (1, 2, 4)
"""Tensor-parallel and pipeline sizes, and stages per rank of the chain or of the LLM, to choose
from, the recipe's own besides."""


class Case(NamedTuple):
    """A model with its data on a cluster."""

    recipe: str
    gpus: int
    changes: tuple[str, ...] = ()
    choose: bool = False
    """Whether to let all methods choose their sizes."""
    effort: float = EFFORT
    """Of DistTrain's planner."""

    @property
    def title(self) -> str:
        """Model and number of devices."""
        return f"{self.recipe}, {self.gpus} GPUs"


CASES = (
    Case("pipeweaver_vlm_s", 16, choose=True),
    Case("pipeweaver_vlm_m", 32, choose=True),
    Case("optimus_model_a", 64, choose=True),
    Case("optimus_vit22b_gpt175b", 1536, choose=True),
    Case("optimus_vit22b_gpt175b", 2048, choose=True),
    Case("optimus_vit22b_gpt175b", 3072, choose=True),
    Case("disttrain_mllm_72b", 160, ("--training.global_batch_size=64",), choose=True),
)
QUICK = (Case("pipeweaver_vlm_s", 16, ("--training.global_batch_size=2",), effort=EFFORT / 50),)


def loaded(case: Case, gpus: int | None = None, **parallel: Any) -> Recipe:
    """The case's recipe, all modules on all ranks, with other parallel sizes."""
    recipe = load_recipe(RECIPES / f"{case.recipe}.toml", case.changes).recipe
    if recipe.parallel.placement == "interleaved":
        section = recipe.parallel.model_copy(update=parallel)
        recipe = recipe.model_copy(update={"parallel": section})
    else:
        recipe = in_one_chain(recipe, **parallel)
    if gpus is not None and (problems := check_recipe(recipe, gpus)):
        raise ConfigError(problems)
    return recipe


class Found(NamedTuple):
    """Methods that share devices, and what their best combination begins with."""

    results: list[Result]
    starts: tuple[Start, ...]
    """Of encoders in bubbles."""
    recipe: Recipe
    """Of searched orders."""


def printed(case: Case, profile: Profile) -> Found:
    """All methods that share devices, with the recipe's sizes."""
    recipe = loaded(case, case.gpus)
    one = loaded(case, case.gpus, virtual_stages=1)  # papers print no other
    filled = in_bubbles([recipe], case.gpus, profile)
    every = (
        forecast("Megatron-LM", one, case.gpus, profile, "megatron"),
        forecast(BASELINE, recipe, case.gpus, profile, "megatron_balanced"),
        None if filled.whole is None else filled.whole._replace(method=WHOLE),
        filled.kernels,
        forecast("PipeWeaver", recipe, case.gpus, profile, "searched"),
    )
    return Found([found for found in every if found is not None], filled.starts, recipe)


def sizes_to_choose_from(case: Case) -> Iterator[Recipe]:
    """The case's recipe with sizes that the model can be cut for on so many devices."""
    own = loaded(case).parallel
    pipelines = sorted({own.pipeline, *PIPELINE})
    every_stages = sorted({own.virtual_stages, *VIRTUAL_STAGES})
    for tensor, pipeline, stages in product(TENSOR, pipelines, every_stages):
        sizes = {"pipeline": pipeline, "tensor": tensor, "sequence_parallel": tensor > 1}
        if case.gpus % (tensor * pipeline) == 0:
            try:
                yield loaded(case, case.gpus, virtual_stages=stages, **sizes)
            except ConfigError:
                continue


def chosen(case: Case, profile: Profile) -> Found:
    """Each method that shares devices with its fastest sizes that fit."""
    recipes = list(sizes_to_choose_from(case))
    filled = in_bubbles(recipes, case.gpus, profile)
    # One stage per rank leaves segments open, which a searched order's planner chooses itself.
    stages = {1, loaded(case).parallel.virtual_stages}
    searched = [recipe for recipe in recipes if recipe.parallel.virtual_stages in stages]
    order, of_order = _fastest("PipeWeaver", searched, case, profile, "searched")
    every = (
        _fastest("Megatron-LM", recipes, case, profile, "megatron")[0],
        _fastest(BASELINE, recipes, case, profile, "megatron_balanced")[0],
        None if filled.whole is None else filled.whole._replace(method=WHOLE),
        filled.kernels,
        order,
    )
    return Found([found for found in every if found is not None], filled.starts, of_order)


def _fastest(
    method: str, recipes: Sequence[Recipe], case: Case, profile: Profile, schedule: str
) -> tuple[Result | None, Recipe]:
    """Of all sizes, the fastest that fits, with the sizes in its note; and its recipe."""
    best, of_best = None, recipes[0]
    for recipe in recipes:
        found = forecast(method, recipe, case.gpus, profile, schedule)
        if found is not None and (best is None or key(found) < key(best)):
            best, of_best = found._replace(note=noted(recipe, found.note)), recipe
    return best, of_best


def case_rows(case: Case, title: str, every: list[Result]) -> list[Row]:
    """Rows of methods: step, MFU, memory."""
    base = next((found for found in every if found.method == BASELINE), None)
    fastest = min(every, key=key)
    rows = []
    for found in every:
        name = found.method + (" (fastest)" if found is fastest else "")
        name += "" if found.step.fits else " (does not fit)"
        base_s = base.step_s if base else None

        def row(
            metric: str, unit: str, ours: float, base: float | None = None, name: str = name,
            **more: Any,
        ) -> Row:  # fmt: skip
            return Row(title, f"{metric}, {name}", unit, ours, base, kind="simulated", **more)

        rows += [
            row("step", "s", found.step_s, base_s, better="lower"),
            row("MFU", "", found.mfu),
            row("idle", "", found.idle, better="lower"),
            row("memory", "GiB", found.peak_gib, better="lower"),
        ]
    return rows


def draw(case: Case, every: list[Result], directory: Path) -> Path:
    """The methods' steps on one time axis, the same step once.

    Not Megatron-LM's: up to three times as long as any other, it would leave the others no room.
    """
    panels: dict[int, Panel] = {}
    for found in every:
        if found.method == METHODS[0]:
            continue
        known = panels.get(id(found.step))
        label = f"{known.label} = {found.method}" if known else found.method
        panels[id(found.step)] = Panel(label, found.step.records, found.step.plan.graph.layout)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"head_to_head_{case.recipe}.svg"
    file.write_text(timelines_svg(f"{case.title}, simulated", [*panels.values()], join=True))
    return file


def run_case(
    case: Case, which: Sequence[str], seeds: int = 1, pictures: Path | None = None
) -> Iterator[list[Row]]:
    """All rows of a case, sizes by sizes.

    Args:
        which: "printed" sizes, "chosen" ones, or both.
        seeds: of the microbatches; the first one's rows are shown in full.
    """
    for sizes in which:
        if sizes == "chosen" and not case.choose:
            continue
        by_seed = [every_method(_seeded(case, seed), sizes) for seed in range(seeds)]
        rows = _shown(case, sizes, by_seed[0])
        yield rows + (spread_rows(f"{case.title}, {sizes} sizes", by_seed) if seeds > 1 else [])
        if pictures is not None and sizes == "printed":
            print(draw(case, by_seed[0], pictures))


def _seeded(case: Case, seed: int) -> Case:
    return case._replace(changes=(*case.changes, f"--simulation.seed={seed}"))


def every_method(case: Case, sizes: str) -> list[Result]:
    """All methods, the best combination last."""
    profile = load_profile(loaded(case).simulation.device)
    found = (chosen if sizes == "chosen" else printed)(case, profile)
    plain, apart = _modules_apart(case)
    every = [*found.results, *([plain] if plain else [])]
    own = [each for each in every if not each.method.startswith("Megatron")]
    together = combined(found.recipe, case.gpus, profile, found.starts, [*own, apart])
    return [*every, *([together] if together else [])]


@cache
def _modules_apart(case: Case) -> tuple[Result | None, Result | None]:
    """The same whoever else chooses sizes."""
    recipe = loaded(case)
    return disttrain(recipe, case.gpus, load_profile(recipe.simulation.device), case.effort)


def spread_rows(title: str, by_seed: Sequence[Sequence[Result]]) -> list[Row]:
    """What other microbatches of the same statistics change; a method counts with the seeds that
    it can run with."""
    steps_s = [{found.method: found.step_s for found in every} for every in by_seed]
    rows = []
    for method in dict.fromkeys(name for every in steps_s for name in every):
        both = [every for every in steps_s if method in every and BASELINE in every]
        own_s = [every[method] for every in both]
        ratio = median(every[BASELINE] / every[method] for every in both)
        own = f"of {len(own_s)} seeds, {method}"
        rows += [
            Row(title, f"least step {own}", "s", min(own_s), better="lower", kind="simulated"),
            Row(title, f"longest step {own}", "s", max(own_s), better="lower", kind="simulated"),
            Row(title, f"median x balanced {own}", "", ratio, kind="simulated"),
        ]
    return rows


def _shown(case: Case, sizes: str, every: list[Result]) -> list[Row]:
    """Rows, while notes are printed."""
    for found in every:
        print(f"{case.title}, {sizes}, {found.method}: {found.step_s:.2f} s; {found.note}")
    return case_rows(case, f"{case.title}, {sizes} sizes", every)


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--cases", nargs="*", metavar="RECIPE", help="only those of these recipes")
    parser.add_argument("--gpus", nargs="*", type=int, metavar="N", help="only on so many GPUs")
    parser.add_argument("--sizes", nargs="*", choices=WHICH, default=WHICH, help="default: both")
    parser.add_argument(
        "--seeds", type=int, default=1, help="of the microbatches; default: %(default)s"
    )
    parser.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="draw the steps there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases: tuple[Case, ...] = QUICK if arguments.quick else CASES
    if arguments.cases:
        cases = tuple(case for case in cases if case.recipe in arguments.cases)
    if arguments.gpus:
        cases = tuple(case for case in cases if case.gpus in arguments.gpus)
    rows: list[Row] = []
    for case in cases:
        for found in run_case(case, arguments.sizes, arguments.seeds, arguments.pictures):
            rows += found
            if arguments.json is not None:  # hours of work: what is done is done
                others = kept_rows(arguments.json, {row.case for row in rows})
                write_rows(others + rows, arguments.json)
    machine = describe_machine(torch.device("cpu"))
    report(f"Head to head, simulated; {machine}", rows, None)


if __name__ == "__main__":
    main()
