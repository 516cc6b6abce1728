"""A figure of ranks without a pipeline: encoder and LLM of each microbatch, in lockstep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.balance.run_costs import build_cost_model, load_simulated_profile
from torchmm.common.files import replace_atomically
from torchmm.costs.flops import modules_with_trained_sources
from torchmm.costs.sizes import sequence_sizes
from torchmm.recipe.read import load_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "papers" / "pipeweaver_vlm_s.toml"
GPUS = 8
CHANGES = {
    "parallel.pipeline": 1, "parallel.tensor": 1, "parallel.schedule": "1f1b",
    "training.global_batch_size": 4 * GPUS,
}  # fmt: skip
ARMS = {
    "none": 'data.reorder = "none", data.balance = "none"',
    "intra": 'data.reorder = "intra", data.balance = "none"',
    "images": 'data.reorder = "none", data.balance = "images"',
}
WIDTH, LEFT, BAR, GAP = 900, 70, 14, 3
COLORS = {"encoder": "#4c78a8", "llm": "#f2a541"}


class Panel(NamedTuple):
    """Times of the modules of one step.

    Attributes:
        title: Keys of the recipe.
        kinds: Kind of each module.
        ms_KRM: (K, R, M), milliseconds by module, rank and microbatch.
    """

    title: str
    kinds: list[str]
    ms_KRM: np.ndarray

    @property
    def step_ms(self) -> float:
        """Sum of the slowest rank over microbatches and modules."""
        return float(self.ms_KRM.max(axis=1).sum())


def panels() -> list[Panel]:
    """Return the step of `RECIPE` in the order of the data, reordered, and with balanced images."""
    result = []
    sample: StepSample | None = None
    for arm, title in ARMS.items():
        reorder, balance = ("none", arm) if arm == "images" else (arm, "none")
        changes = CHANGES | {"data.reorder": reorder, "data.balance": balance}
        overrides = [f"--{key}={value}" for key, value in changes.items()]
        recipe = load_recipe(RECIPE, overrides, GPUS).recipe
        profile = load_simulated_profile(recipe)
        forecaster = StepSimulator(recipe, GPUS, profile, sample=sample)
        sample = forecaster.sample
        model = build_cost_model(forecaster.run, forecaster.modules, profile)
        metas = [meta for share in forecaster.shares for meta in share]
        arrives = [modules_with_trained_sources(forecaster.modules, meta) for meta in metas]
        ms_KN = np.zeros((len(forecaster.modules), len(metas)))
        for module, ms_N in zip(forecaster.modules, ms_KN, strict=True):
            at, sizes = sequence_sizes(module, metas)
            if sizes is not None:
                needs_input_grad_N = np.array([arrives[i][module.name] for i in at], bool)
                costs = model.stage_costs(module, 0, len(module.layers), sizes, needs_input_grad_N)
                ms_N[at] = costs.forward.total_ms + costs.backward.total_ms
        kinds = [module.kind for module in forecaster.modules]
        result.append(Panel(title, kinds, ms_KN.reshape(len(kinds), GPUS, -1)))
    return result


def draw_lockstep(file: Path) -> list[float]:
    """Draw the `panels` as SVG; return their steps in milliseconds."""
    all_panels = panels()
    scale = (WIDTH - LEFT - 20) / max(panel.step_ms for panel in all_panels)
    height = GPUS * (BAR + GAP) + 40
    body = [
        line for i, panel in enumerate(all_panels) for line in _panel(panel, 34 + i * height, scale)
    ]
    total = 34 + len(all_panels) * height
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{total}" fill="white"/>',
        *_legend(),
        *body,
        "</svg>",
    ]
    replace_atomically(file, ("\n".join(svg) + "\n").encode())
    return [panel.step_ms for panel in all_panels]


def _legend() -> Iterator[str]:
    x = LEFT
    for text, color in (
        ("encoder", COLORS["encoder"]),
        ("LLM", COLORS["llm"]),
        ("idle", "#e6e6e6"),
    ):
        yield f'<rect x="{x}" y="10" width="12" height="12" fill="{color}"/>'
        yield f'<text x="{x + 17}" y="21">{text}</text>'
        x += 90


def _panel(panel: Panel, top: float, scale: float) -> Iterator[str]:
    busy = panel.ms_KRM.sum() / (GPUS * panel.step_ms)
    title = f"{panel.title}: {panel.step_ms / 1e3:.1f} s, ranks compute {busy:.0%} of the time"
    yield f'<text x="{LEFT}" y="{top + 14}" font-weight="bold">{title}</text>'
    top += 22
    for rank in range(GPUS):
        y = top + rank * (BAR + GAP)
        yield f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">rank {rank}</text>'
        width = panel.step_ms * scale
        yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="#e6e6e6"/>'
        yield from _boxes(panel, rank, y, scale)


def _boxes(panel: Panel, rank: int, y: float, scale: float) -> Iterator[str]:
    begin_ms = 0.0
    for index in range(panel.ms_KRM.shape[2]):
        times: Sequence[np.ndarray] = panel.ms_KRM[:, :, index]
        for kind, ms_R in zip(panel.kinds, times, strict=True):
            x, width = LEFT + begin_ms * scale, float(ms_R[rank]) * scale
            if width > 0:
                yield (
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                    f'fill="{COLORS[kind]}"/>'
                )
            begin_ms += float(ms_R.max())
        x = LEFT + begin_ms * scale
        yield f'<path d="M{x:.1f} {y - 1} v{BAR + 2}" stroke="#333"/>'
