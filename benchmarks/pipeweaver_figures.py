"""Simulate PipeWeaver table 5 and figures 8, 9, 10, 11, 13 and 14.

    python benchmarks/pipeweaver_figures.py [--quick] [--json FILE] [--cases NAME ...]

Table 5 is VLM-S (ViT 5B + Llama3 8B, TP 4, PP 4, 16 H800) with 32 microbatches of 8192 tokens.
Image counts are sampled with the printed seed. The techniques are added one at a time:

1. Megatron-LM: all layers in one pipeline of virtual stages with equal parameter counts,
   interleaved 1F1B; all images of a microbatch in one batch.
2. Modality-aware partitioner: separate segments of each module on all ranks; a stage processes
   groups of images sequentially, still interleaved 1F1B.
3. Stage interleaving: the dispatcher, segments in the default order.
4. Ranking: the order of segments is searched.
5. Layer tuning: per-layer and per-microbatch recomputation up to the memory limit.

Rows 1 to 4 use full recomputation, because the paper does not print the recomputation of its
baseline. A second table has the best fixed mode of each module that fits. The paper prints no
virtual stages, microbatches or memory limit, so times are ratios to the first row. The cost model
is not calibrated: nothing was measured on an H800.

Figure 9b: every third of 40 iterations with rising and falling image counts, modules split once for
typical data. "static plan": a single pipeline with stages of equal cost (nnScaler* of the paper).
"sequential modules": all encoder segments before the LLM (Optimus, coarse). "no search": row 2. The
paper prints: Megatron-LM 52.9 % slower at iteration 6, Optimus and nnScaler 10.4 % in iterations 1
to 10, nnScaler 50.5 % in iterations 15 to 20. It does not print how image counts fall. Here both
bounds fall evenly.

Figure 10: the best and the worst schedule for each sub-microbatch size. The worst is the longest of
as many random schedules as the search tries. The paper used an inverted search for it.

Figure 9a: the five models of table 4, on one step of the data of their recipes instead of 100. The
paper prints the minimum and maximum gain over any baseline. It has no "sequential modules" for T2V.

Figure 11: memory of the first rank of VLM-M. The paper does not define a fluctuation. Here it is
the range of memory in use in the middle half of a step.

Figure 8: the best schedule for mixed stages and for separate stages of each module. The model of
the text (ViT 2B + LM 5B) has no printed shape, so VLM-S replaces it.

Figure 13: VLM-M on 64 devices, all sizes that are powers of two, on one global batch. The paper
does not print the size of its batch. It prints the best sizes and their MFU. The accuracy of 97.6 %
needs the devices of the paper.

Figure 14: models of table 6 with 102 and 197 billion parameters on 3,072 to 16,384 H100, one
pipeline of 32 microbatches, with the collectives of data parallelism. Data-parallel ranks get their
sequences by work (`data.reorder`). One row shows the imbalance without reordering. The paper prints
one MFU for each model, and the maximum slowdown of a baseline (82.8 %).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean

import numpy as np
from support.harness import Row, run_cases
from support.papers.paper_figures import (
    PIPEWEAVER_ABLATION,
    PIPEWEAVER_COARSE_GAIN,
    PIPEWEAVER_COARSE_PEAK,
    PIPEWEAVER_FLUCTUATION,
    PIPEWEAVER_GAINS,
    PIPEWEAVER_GRID_BEST,
    PIPEWEAVER_GRID_MFU,
    PIPEWEAVER_LARGE_GAIN,
    PIPEWEAVER_LARGE_MFU,
    PIPEWEAVER_MIXED,
    PRINTED_SIZES,
)
from support.papers.pipeweaver_steps import COARSE, SEED, Model, Setting, Timed, ladder, systems

from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import LAYER_MODES
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, search_orders
from torchmm.pipelining.plan.graph import StageGraph

MICROBATCHES = 32
EVALUATIONS = 1000
"""Number of orders that a search tries."""
SIZES = (4, 8, 12, 16, 24, 32)
BASELINES = ("Megatron-LM", "static plan", COARSE)
MEASURED = {
    "VLM-S": Model("pipeweaver_vlm_s", 1, 4, 4),
    "VLM-M": Model("pipeweaver_vlm_m", 1, 4, 8),
    "VLM-L": Model("pipeweaver_vlm_l", 1, 8, 8),
    "T2V-S": Model("pipeweaver_t2v_s", 1, 4, 4),
    "T2V-L": Model("pipeweaver_t2v_l", 1, 8, 8),
}
"""Table 4."""
LONGEST = 16
"""Pipeline of VLM-M: with more ranks its 127 layers cannot fill the chain's virtual stages."""
LARGE = {
    sizes.source.split(", ")[-1]: Model(sizes.recipe, sizes.data, sizes.pipeline, sizes.tensor)
    for sizes in PRINTED_SIZES
    if sizes.source.startswith("PipeWeaver table 6")
}


def best_fixed(setting: Setting, evaluations: int) -> dict[str, Timed]:
    """Return the fastest step of each technique with one mode per module that fits."""
    best: dict[str, Timed] = {}
    for modes in product(LAYER_MODES, repeat=len(setting.modules)):
        for name, found in ladder(setting, modes, evaluations):
            fits = found.peak_bytes <= setting.limit_bytes
            if fits and (name not in best or found.ms < best[name].ms):
                best[name] = found
    return best


def ablation_rows(setting: Setting, evaluations: int, *, fixed: bool) -> list[Row]:
    """Return the rows of table 5."""
    full = dict(ladder(setting, ("full",) * len(setting.modules), evaluations))
    tables = {"full recomputation": full}
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
                Row(case, "speedup over Megatron-LM", "x", first.ms / step.ms, 1.0,
                    1 + printed.gain.value, kind="simulated"),
                Row(case, "bubbles", "fraction", step.bubbles, better="lower", kind="simulated"),
                Row(case, "memory / limit", "fraction", step.peak_bytes / setting.limit_bytes,
                    better="lower", kind="simulated"),
            ]  # fmt: skip
    return rows


def size_rows(microbatches: int, sizes: Sequence[int], evaluations: int) -> list[Row]:
    """Return figure 10: best and worst schedule per sub-microbatch size, relative to 12."""
    best, worst = {}, {}
    for size in sizes:
        setting = Setting(microbatches, size)
        graph = setting.separated()
        dispatcher = Dispatcher(graph, setting.costs(graph, ("full",) * len(setting.modules)))
        found = search_orders(dispatcher, SearchBudget(evaluations=evaluations), seed=SEED)
        best[size] = found.makespan_ms
        rng, longest = np.random.default_rng(SEED), found.default_order_ms
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
            Row(case, "step / step with 12 images", "x", best[size] / best[12], 1.0,
                1.121 if size == 4 else None, better="lower", kind="simulated"),
            Row(case, "worst schedule longer by", "fraction", worst[size] / best[size] - 1, None,
                printed.get(size), better="lower", kind="simulated"),
        ]  # fmt: skip
    return rows


def bounds_by_iteration() -> list[tuple[int, int]]:
    """Return minimum and maximum image counts of 40 iterations.

    Both rise within 5 iterations and fall to 0 within 15 iterations, twice.
    """
    rising = [(4 * i, 32) for i in range(5)]
    falling = [(round(16 * (14 - i) / 15), round(32 * (14 - i) / 14)) for i in range(15)]
    return 2 * (rising + falling)


def dynamic_rows(setting: Setting, every: int, evaluations: int) -> list[Row]:
    """Return figure 9b: rising and falling image counts, with times relative to torchmm."""
    groups: dict[str, list[dict[str, float]]] = {}
    for index, (least, most) in enumerate(bounds_by_iteration()):
        if (index - 5) % every:
            continue
        other = setting.with_images(least, most, SEED + index)
        step = {name: found.ms for name, found in systems(other, evaluations).items()}
        phases = ["iterations 1-10" if index % 20 < 10 else "iterations 11-20"]
        phases += ["iteration 6"] * (index == 5) + ["iterations 15-20"] * (index % 20 >= 14)
        for phase in phases:
            groups.setdefault(phase, []).append(step)
    printed = {
        ("iteration 6", "Megatron-LM"): 1.529,
        ("iterations 1-10", COARSE): 1.104,
        ("iterations 1-10", "static plan"): 1.104,
        ("iterations 15-20", "static plan"): 1.505,
    }
    rows = []
    for phase, steps in groups.items():
        for name in ("Megatron-LM", "static plan", COARSE, "no search", "searched"):
            ratios = [step[name] / step["tuned"] for step in steps if name in step]
            if ratios:
                rows.append(
                    Row(f"figure 9b, {phase}: {name}", "mean step / tuned step", "x",
                        fmean(ratios), 1.0, printed.get((phase, name)), better="lower",
                        kind="simulated")
                )  # fmt: skip
    return rows


def average_rows(names: Sequence[str], microbatches: int, evaluations: int) -> list[Row]:
    """Return figure 9a: throughput compared with static plans, per model type."""
    rows = []
    gains: dict[str, list[float]] = {}
    for name in names:
        setting = Setting(microbatches, model=MEASURED[name])
        found = systems(setting, evaluations)
        if "tuned" not in found:
            continue
        kind = name.split("-")[0]
        for system in BASELINES if kind == "VLM" else BASELINES[:2]:
            if system in found:
                gain = found[system].ms / found["tuned"].ms - 1
                gains.setdefault(kind, []).append(gain)
                case = f"figure 9a, {name}: {system}"
                rows.append(Row(case, "torchmm faster by", "fraction", gain, kind="simulated"))
    for kind, own in gains.items():
        least, most = PIPEWEAVER_GAINS[kind]
        case = f"figure 9a, {kind}"
        rows += [
            Row(case, "minimum over a baseline", "fraction", min(own), None, least.value,
                kind="simulated"),
            Row(case, "maximum over a baseline", "fraction", max(own), None, most.value,
                kind="simulated"),
        ]  # fmt: skip
    return rows


def memory_rows(microbatches: int, evaluations: int) -> list[Row]:
    """Return figure 11: memory of the first rank, and the gain from its use."""
    found = systems(Setting(microbatches, model=MEASURED["VLM-M"]), evaluations)
    chain = found["Megatron-LM"]
    rows = []
    for name in ("Megatron-LM", COARSE, "searched", "tuned"):
        if name not in found:
            continue
        own = found[name]
        over = PIPEWEAVER_COARSE_PEAK.value if name == COARSE else None
        fewer = PIPEWEAVER_FLUCTUATION.value if name == "tuned" else None
        case = f"figure 11, {name}"
        rows += [
            Row(case, "peak above Megatron-LM", "fraction",
                own.first_peak_bytes / chain.first_peak_bytes - 1, None, over, better="lower",
                kind="simulated"),
            Row(case, "fewer fluctuations than Megatron-LM", "fraction",
                1 - own.fluctuation_bytes / chain.fluctuation_bytes, None, fewer,
                kind="simulated"),
        ]  # fmt: skip
    if COARSE in found and "tuned" in found:
        gain = found[COARSE].ms / found["tuned"].ms - 1
        rows.append(Row("figure 11, tuned", f"faster than {COARSE} by", "fraction", gain, None,
                        PIPEWEAVER_COARSE_GAIN.value, kind="simulated"))  # fmt: skip
    return rows


def partition_rows(setting: Setting, evaluations: int) -> list[Row]:
    """Return figure 8: stages of several modules compared with stages of one module."""
    modes = ("full",) * len(setting.modules)

    def best_ms(graph: StageGraph) -> float:
        dispatcher = Dispatcher(graph, setting.costs(graph, modes))
        return search_orders(
            dispatcher, SearchBudget(evaluations=evaluations), seed=SEED
        ).makespan_ms

    mixed_ms = min(best_ms(setting.static()), best_ms(setting.megatron()))
    longer = mixed_ms / best_ms(setting.separated()) - 1
    metric, paper = "mixed stages longer than separated by", PIPEWEAVER_MIXED.value
    return [Row("figure 8, VLM-S", metric, "fraction", longer, None, paper, kind="simulated")]


def grid(devices: int, longest: int) -> list[Model]:
    """Return all power-of-two parallelism degrees with several ranks per pipeline."""
    powers = [1 << i for i in range(devices.bit_length())]
    return [
        Model("pipeweaver_vlm_m", devices // (pipeline * tensor), pipeline, tensor)
        for tensor in powers
        for pipeline in powers
        if tensor <= 8 and 1 < pipeline <= min(longest, devices // tensor)
    ]


def grid_rows(models: Sequence[Model], sequences: int, evaluations: int) -> list[Row]:
    """Return figure 13: MFU of VLM-M for the parallelism degrees that fit."""
    found = {}
    for model in models:
        setting = Setting(sequences // model.data, model=model)
        steps = dict(ladder(setting, ("full",) * len(setting.modules), evaluations))
        fitting = [s for s in steps.values() if s.peak_bytes <= setting.limit_bytes]
        if fitting:
            found[model] = setting.mfu(min(fitting, key=lambda step: step.ms))
    rows = []
    for model, mfu in found.items():
        sizes = model.data, model.pipeline, model.tensor
        paper = PIPEWEAVER_GRID_MFU.value if sizes == PIPEWEAVER_GRID_BEST else None
        best = " (best)" if mfu == max(found.values()) else ""
        case = f"figure 13, DP {model.data} TP {model.tensor} PP {model.pipeline}{best}"
        rows.append(Row(case, "MFU", "fraction", mfu, None, paper, kind="simulated"))
    return rows


def large_rows(models: Sequence[str], microbatches: int, evaluations: int) -> list[Row]:
    """Return figure 14: MFU on thousands of devices, and throughput compared with static plans."""
    rows, gains = [], []
    for name in models:
        setting = Setting(microbatches, model=LARGE[name])
        found = systems(setting, evaluations)
        if "searched" not in found:
            setting.limited = False
            found = systems(setting, evaluations)
        ours = found.get("tuned", found["searched"])
        case = f"figure 14, {name}"
        as_they_come = Setting(microbatches, model=LARGE[name], dealt=False).mean_flops_fraction
        rows += [
            Row(case, "work of the mean pipeline", "fraction", setting.mean_flops_fraction,
            as_they_come,
                kind="simulated")
        ]  # fmt: skip
        for system, step in found.items():
            printed = PIPEWEAVER_LARGE_MFU[setting.sizes.recipe].value if step is ours else None
            case = f"figure 14, {name}: {system}"
            rows += [
                Row(case, "MFU", "fraction", setting.mfu(step), None, printed, kind="simulated"),
                Row(case, "memory / limit", "fraction", step.peak_bytes / setting.limit_bytes,
                    better="lower", kind="simulated"),
            ]  # fmt: skip
            if step is not ours:
                gain = step.ms / ours.ms
                rows.append(Row(case, "torchmm faster", "x", gain, 1.0, kind="simulated"))
                gains += [gain] * (system in BASELINES)
    return [*rows, Row("figure 14, all", "maximum over a baseline", "x", max(gains), 1.0,
                       1 + PIPEWEAVER_LARGE_GAIN.value, kind="simulated")]  # fmt: skip


def _count(size: str) -> int:
    """Return the number of microbatches."""
    return MICROBATCHES if size == "full" else 16


def _evaluations(size: str) -> int:
    """Return the number of orders that a search tries."""
    return EVALUATIONS if size == "full" else EVALUATIONS // 20


def ablation(size: str) -> list[list[Row]]:
    """Return table 5; the best fixed modes only at full size."""
    return [ablation_rows(Setting(_count(size)), _evaluations(size), fixed=size == "full")]


def sub_microbatches(size: str) -> list[list[Row]]:
    """Return figure 10."""
    sizes = SIZES if size == "full" else (4, 12)
    return [size_rows(_count(size), sizes, _evaluations(size))]


def iterations(size: str) -> list[list[Row]]:
    """Return figure 9b, for every third iteration."""
    every = 3 if size == "full" else 20
    return [dynamic_rows(Setting(_count(size)), every, _evaluations(size) // 4)]


def averages(size: str) -> list[list[Row]]:
    """Return figure 9a."""
    names = list(MEASURED) if size == "full" else list(MEASURED)[:1]
    return [average_rows(names, _count(size), _evaluations(size))]


def memory(size: str) -> list[list[Row]]:
    """Return figure 11, only at full size."""
    return [memory_rows(MICROBATCHES, EVALUATIONS // 4)] if size == "full" else []


def partitions(size: str) -> list[list[Row]]:
    """Return the text of figure 8."""
    return [partition_rows(Setting(_count(size)), _evaluations(size))]


def parallel_sizes(size: str) -> list[list[Row]]:
    """Return figure 13."""
    sizes = grid(64, LONGEST)
    if size == "full":
        return [grid_rows(sizes, 128, EVALUATIONS // 5)]
    return [grid_rows(sizes[-2:], 64, EVALUATIONS // 100)]


def large(size: str) -> list[list[Row]]:
    """Return figure 14, only at full size."""
    return [large_rows(list(LARGE), MICROBATCHES, EVALUATIONS)] if size == "full" else []


CASES: dict[str, Callable[[str], list[list[Row]]]] = {
    "table5": ablation,
    "figure10": sub_microbatches,
    "figure9b": iterations,
    "figure9a": averages,
    "figure11": memory,
    "figure8": partitions,
    "figure13": parallel_sizes,
    "figure14": large,
}


def main() -> None:
    """Print the tables."""
    run_cases("PipeWeaver", __doc__, CASES, f"seed {SEED}, simulated")


if __name__ == "__main__":
    main()
