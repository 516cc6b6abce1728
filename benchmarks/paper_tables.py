"""Recompute the tables of the papers: torchmm value, paper value and relative error per cell.

    python benchmarks/paper_tables.py [--quick] [--json FILE]

Exact cells are first: one partition, parameters and FLOPs, and identities (parallel sizes, MFU, and
values that follow from other tables). Simulated steps follow (`paper_steps.py`), with one factor
fitted on one cell. A note explains each value that does not follow from the text of a paper. All
values follow from recipes in recipes/papers. No random numbers and no device are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise

import transformers
from support.harness import make_parser, write_rows
from support.papers import paper_figures as paper
from support.papers import paper_steps
from support.papers.paper_cells import (
    Comparison,
    Section,
    identities,
    recipe_named,
    show,
)
from support.papers.paper_figures import Figure

from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.common.layers import ModuleDescription
from torchmm.costs.flops import microbatch_flops
from torchmm.pipelining.schedules.layouts import balanced_split
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.read import resolve_sizes


@cache
def built(name: str) -> tuple[dict[str, int], list[ModuleDescription]]:
    """Return (parameters by module, module descriptions) of a model on the meta device."""
    recipe = recipe_named(name)
    model = recipe_model(recipe)
    counts = {module: every for module, (every, _) in model.parameter_counts().items()}
    return counts, [module.describe() for module in model.modality_modules()]


def step_flops(name: str, sequences: int) -> float:
    """Return forward and backward FLOPs of a step without recomputation."""
    recipe = recipe_named(name)
    size = recipe.training.microbatch_size
    metas = sample_microbatches(
        recipe.simulation,
        sequences // size,
        sequence_length=recipe.training.sequence_length,
        microbatch_size=size,
    )
    modules = built(name)[1]
    by_sizes = {tuple(s.tokens for s in meta.samples): meta for meta in metas}
    assert len(by_sizes) == 1, f"{name}: microbatches differ, so they have to be counted one by one"
    return len(metas) * sum(sum(flops) for flops in microbatch_flops(modules, metas[0]).values())


def parallel_sizes() -> Section:
    """Return data-parallel sizes of the recipes on the GPUs of the papers."""
    cells = []
    for sizes in paper.PRINTED_SIZES:
        recipe = recipe_named(sizes.recipe)
        # VLM-XL and T2V-XL come with two.
        update = {"pipeline": sizes.pipeline, "tensor": sizes.tensor}
        parallel = recipe.parallel.model_copy(update=update)
        layout = resolve_sizes(parallel, sizes.gpus)
        printed = Figure(f"{sizes.source}, DP", sizes.data, "ranks")
        note = f"{sizes.gpus} GPUs / (pipeline {layout.pipeline} x tensor {layout.tensor})"
        cells.append(Comparison(printed, layout.data_parallel, note, goal_percent=0))
    for gpus, row in paper.OPTIMUS_SCHEDULER.items():
        recipe = recipe_named("optimus_vit22b_gpt175b")
        data = resolve_sizes(recipe.parallel, gpus).data_parallel
        count = recipe.training.global_batch_size / data / recipe.training.microbatch_size
        source = f"Optimus table 7, {gpus} GPUs, microbatches"
        cells.append(Comparison(Figure(source, row.microbatches, ""), count, goal_percent=0))
    simulation = recipe_named("pipeweaver_vlm_s").simulation
    most = 8192 // simulation.images["vision"].tokens
    cells.append(Comparison(paper.PIPEWEAVER_MAX_IMAGES, most, "8192 // 169", goal_percent=0))
    return identities("Parallel sizes", cells)


def parameters() -> Section:
    """Return parameter counts of the modules, compared with the model names in the papers."""
    cells = []
    for size in paper.NAMED_SIZES:
        counts, _ = built(size.recipe)
        goal = None if size.differs else 2.0
        figure = size.name._replace(source=f"{size.name.source} ({size.recipe})")
        cells.append(Comparison(figure, counts[size.module], size.differs, goal))
    return Section("Parameters", cells)


def flops() -> Section:
    """Return the FLOPs of an iteration that all nine rows of Optimus table 5 imply."""
    counted = step_flops("optimus_vit22b_gpt175b", paper.STRONG_SCALING_BATCH)
    counted *= paper_steps.RECOMPUTED
    note = "counted on our recipe, forward twice; paper: MFU x time x GPUs x 989 TFLOP/s"
    cells = []
    for (_, gpus), row in paper.OPTIMUS_STRONG_SCALING.items():
        implied = row.mfu.value * row.seconds.value * gpus * paper.OPTIMUS_PEAK_FLOPS.value
        source = row.seconds.source.replace("iteration time", "FLOPs of an iteration")
        cells.append(Comparison(Figure(source, implied, "FLOP"), counted, note, 2.0))
    return Section("FLOPs", cells)


def printed_mfu() -> Section:
    """Return the MFU that the times and FLOPs of the papers imply."""
    cells = []
    for (_, gpus), row in paper.OPTIMUS_STRONG_SCALING.items():
        ours = row.flops_per_s.value / gpus / paper.OPTIMUS_PEAK_FLOPS.value
        cells.append(Comparison(row.mfu, ours, "its aggregate / GPUs / 989 TFLOP/s", 0.5))
    for imbalance in paper.PIPEWEAVER_IMBALANCE.values():
        rate = imbalance.flops / (8 * imbalance.seconds)
        note = "its PFLOPs / (8 GPUs x time x 989 TFLOP/s)"
        cells.append(Comparison(imbalance.mfu, rate / paper.PIPEWEAVER_PEAK_FLOPS, note, 1.0))
    return identities("MFU", cells)


def arithmetic() -> Section:
    """Return the checks of the paper tables against each other and against the text."""
    scaling = paper.OPTIMUS_STRONG_SCALING
    cells = []
    for gpus, printed in paper.OPTIMUS_SPEEDUPS.items():
        balanced, optimus = (
            scaling[m, gpus].seconds.value for m in ("Megatron-LM balanced", "Optimus")
        )
        cells.append(Comparison(printed, balanced / optimus, "of its times", 0.5))
    step = paper.OPTIMUS_STEP.value
    for bubble in paper.OPTIMUS_BUBBLES.values():
        share = bubble.duration.value / step
        error = abs(share / bubble.share.value - 1)
        note = "its time / 5.12 s" + ("; printed shares do not follow" if error > 0.016 else "")
        cells.append(Comparison(bubble.share, share, note))
    idle = sum(bubble.duration.value for bubble in paper.OPTIMUS_BUBBLES.values()) / step
    claim = Figure("Optimus section 2.2, idle ('over 48 %')", 0.48, "")
    cells.append(Comparison(claim, idle, "sum of its times; does not follow"))
    cells.append(_virtual_stages(idle * step))
    small = {method: figure.value for method, figure in paper.OPTIMUS_SMALL.items()}
    for method, speedup in (("Alpa", 3.09), ("FSDP", 1.151)):
        claim = Figure(f"Optimus section 5.2.1, speedup over {method}", speedup, "x")
        cells.append(Comparison(claim, small[method] / small["Optimus"], "of table 4", 0.5))
    kept = [row.coarse.value * row.microbatches for row in paper.OPTIMUS_SCHEDULER.values()]
    for gpus, microbatches in zip(paper.OPTIMUS_SCHEDULER, kept, strict=True):
        source = f"Optimus table 7, {gpus} GPUs, Eff_coarse x microbatches"
        note = "mean of the three: coarse bubbles hold a constant number of microbatches"
        mean = sum(kept) / len(kept)
        cells.append(Comparison(Figure(source, microbatches, ""), mean, note, 0.5))
    cells += _scheduler_runtimes()
    cells += _pipeweaver_arithmetic()
    return identities("Arithmetic of the papers", cells)


def _virtual_stages(idle_s: float) -> Comparison:
    """Compare stages per rank V with the value that idle times of (P - 1) / V imply."""
    recipe = recipe_named("optimus_vit22b_gpt175b")
    waits_s = sum(b.duration.value for n, b in paper.OPTIMUS_BUBBLES.items() if n.startswith("pp"))
    per_microbatch_s = (paper.OPTIMUS_STEP.value - idle_s) / paper.OPTIMUS_SCHEDULER[
        3072
    ].microbatches
    implied = (recipe.parallel.pipeline - 1) * per_microbatch_s / waits_s
    printed = Figure(
        "Optimus table 1, virtual stages (table 12's)", recipe.parallel.virtual_stages, ""
    )
    note = (
        "(pipeline - 1) x computing per microbatch / PP bubbles, with table 7's 16 microbatches: "
        "table 1's stages are not interleaved"
    )
    return Comparison(printed, implied, note)


def _scheduler_runtimes() -> Iterator[Comparison]:
    """Yield scheduler times, if all C(N - 1, 3) assignments of N microbatches cost N each."""
    first, *others = paper.OPTIMUS_SCHEDULER.values()

    def work(row: paper.Scheduler) -> int:
        return math.comb(row.microbatches - 1, 3) * row.microbatches

    for row in others:
        note = "runtime at 1536 GPUs, scaled by C(N - 1, 3) N: all assignments to 4 pipelines"
        yield Comparison(row.runtime, first.runtime.value * work(row) / work(first), note, 10.0)


def _pipeweaver_arithmetic() -> Iterator[Comparison]:
    imbalance = paper.PIPEWEAVER_IMBALANCE
    whole = imbalance["LM 7B"].mfu.value
    for row, printed in paper.PIPEWEAVER_OVERHEADS.items():
        note = "1 - its MFU / that of LM 7B: a loss of MFU, not of time"
        yield Comparison(printed, 1 - imbalance[row].mfu.value / whole, note, 2.5)
    first = paper.PIPEWEAVER_ABLATION["Megatron-LM"].seconds.value
    for name, row in paper.PIPEWEAVER_ABLATION.items():
        if name != "Megatron-LM":
            ours = first / row.seconds.value - 1
            yield Comparison(row.gain, ours, "its first time / its time - 1", 0.5)


def partition_example() -> Section:
    """Return the best partition of the PipeWeaver example, as found by torchmm."""
    example = paper.PIPEWEAVER_PARTITION
    costs = [example.encoder_layer_ms] * example.encoder_layers
    costs += [example.llm_layer_ms] * example.llm_layers
    ends = [0, *accumulate(balanced_split(costs, example.stages))]
    stages = [sum(costs[start:stop]) for start, stop in pairwise(ends)]
    least, most = min(stages), max(stages)
    cells = [
        Comparison(example.shortest, least, goal_percent=0),
        Comparison(example.longest, most, goal_percent=0),
        Comparison(example.variation, round(most / least - 1, 3), goal_percent=0),
    ]
    return Section("Partition of 64 + 64 layers into 16 stages", cells)


def exact_sections() -> list[Section]:
    """Return the sections that require no simulation."""
    identical = [parallel_sizes(), printed_mfu(), arithmetic()]
    return [partition_example(), parameters(), flops(), *identical]


def main() -> None:
    """Print all tables."""
    parser = make_parser("Tables of the papers: torchmm, paper, relative error.")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = [*exact_sections(), *paper_steps.sections(arguments.quick)]
    for section in found:
        show(section)
    if arguments.json is not None:
        write_rows([r for s in found for c in s.cells for r in c.rows()], arguments.json)


if __name__ == "__main__":
    main()
