"""Pictures, figures and the recipe of optimus.md are up to date."""

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


def test_the_picture_and_its_figures_are_up_to_date(tmp_path, capsys):
    arguments = shlex.split(block("sh").replace("\\\n", " "))[2:]
    place = arguments.index("--out") + 1
    picture = ROOT / arguments[place]
    arguments[place] = str(tmp_path / "picture.svg")
    assert runpy.run_path(str(ROOT / "scripts/draw.py"))["main"](arguments) == 0
    stale = f"{picture.relative_to(ROOT)} is stale; run the command in docs/concepts/optimus.md"
    assert (tmp_path / "picture.svg").read_text() == picture.read_text(), stale
    figures = re.findall(r": (\S+) ms,", capsys.readouterr().out)
    caption = re.sub(r"\s+", " ", TEXT.split("```")[0])
    assert len(figures) == 3 and all(f"{figure} ms" in caption for figure in figures), figures


def test_the_recipe_is_valid():
    parallel = ParallelConfig.model_validate(tomli.loads(block("toml"))["parallel"])
    assert parallel.explicit_sizes("vision") == {"pipeline": 2, "tensor": 1, "replicate": 1}
