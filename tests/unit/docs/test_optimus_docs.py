"""Tests of optimus.md: plot, times and recipe are up to date."""

import re
import runpy
import shlex
from pathlib import Path

import tomli

from torchmm.recipe.parallel_section import ParallelConfig

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
TEXT = (DOCS / "concepts" / "optimus.md").read_text()


def block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[0]


def test_optimus_plot_and_times_are_up_to_date(tmp_path, capsys):
    arguments = shlex.split(block("sh").replace("\\\n", " "))[2:]
    index = arguments.index("--out") + 1
    plot = ROOT / arguments[index]
    arguments[index] = str(tmp_path / "plot.svg")
    assert runpy.run_path(str(ROOT / "scripts/draw.py"))["main"](arguments) == 0
    stale = f"{plot.relative_to(ROOT)} is stale; run the command in docs/concepts/optimus.md"
    assert (tmp_path / "plot.svg").read_text() == plot.read_text(), stale
    times = re.findall(r": (\S+) ms,", capsys.readouterr().out)
    caption = re.sub(r"\s+", " ", TEXT.split("```")[0])
    assert len(times) == 3 and all(f"{time} ms" in caption for time in times), times


def test_optimus_page_recipe_is_valid():
    parallel = ParallelConfig.model_validate(tomli.loads(block("toml"))["parallel"])
    assert parallel.explicit_sizes("vision") == {"pipeline": 2, "tensor": 1, "replicate": 1}
