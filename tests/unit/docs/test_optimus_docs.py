"""Of optimus.md, comparison.md, which_placement.md: pictures, figures, recipe are up to date."""

import json
import re
import runpy
import shlex
from pathlib import Path

import tomli

from torchmm.recipe.parallel_section import ParallelConfig

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
TEXT = (DOCS / "understand" / "optimus.md").read_text()


def block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[0]


def test_the_picture_and_its_figures_are_up_to_date(tmp_path, capsys):
    arguments = shlex.split(block("sh").replace("\\\n", " "))[2:]
    place = arguments.index("--out") + 1
    picture = ROOT / arguments[place]
    arguments[place] = str(tmp_path / "picture.svg")
    assert runpy.run_path(str(ROOT / "scripts/draw.py"))["main"](arguments) == 0
    stale = f"{picture.relative_to(ROOT)} is stale; run the command in docs/understand/optimus.md"
    assert (tmp_path / "picture.svg").read_text() == picture.read_text(), stale
    figures = re.findall(r": (\S+) ms,", capsys.readouterr().out)
    caption = re.sub(r"\s+", " ", TEXT.split("```")[0])
    assert len(figures) == 3 and all(f"{figure} ms" in caption for figure in figures), figures


def test_the_recipe_is_valid():
    parallel = ParallelConfig.model_validate(tomli.loads(block("toml"))["parallel"])
    assert parallel.sizes_given("vision") == {"pipeline": 2, "tensor": 1, "replicate": 1}


def test_the_comparison_is_that_of_the_results():
    rows = json.loads((ROOT / "benchmarks/results/head_to_head.json").read_text())
    steps: dict[str, list[str]] = {}
    for row in rows:
        if row["metric"].startswith("step, "):
            number = f"{row['ours']:.2f}" + " †" * ("does not fit" in row["metric"])
            number = f"**{number}**" if "fastest" in row["metric"] else number
            steps.setdefault(row["case"], []).append(number)
    table = (DOCS / "understand" / "comparison.md").read_text()
    for case, numbers in steps.items():
        model, sizes = case.rsplit(", ", 1)
        line = f"| {model} | {sizes.removesuffix(' sizes')} | {' | '.join(numbers)} |"
        assert line in table, line


def test_the_decision_page_has_the_ratios_of_the_results():
    """By case: columns of the table's rows, of the balanced chain and of what is recommended."""
    rows = json.loads((ROOT / "benchmarks/results/head_to_head.json").read_text())
    found = {(r["case"], r["metric"]): r["ours"] for r in rows if r["metric"].startswith("step, ")}
    page = (DOCS / "grow" / "which_placement.md").read_text()
    compared = [
        ("pipeweaver_vlm_s, 16 GPUs, chosen sizes", ["Optimus, whole actions", "PipeWeaver"]),
        ("pipeweaver_vlm_m, 32 GPUs, chosen sizes", ["Optimus, whole actions", "PipeWeaver"]),
        ("pipeweaver_vlm_s, 16 GPUs, printed sizes", ["Optimus, whole actions", "DistTrain"]),
        ("pipeweaver_vlm_m, 32 GPUs, printed sizes", ["Optimus, whole actions", "DistTrain"]),
        ("optimus_model_a, 64 GPUs, printed sizes", ["Optimus, whole actions"]),
        ("optimus_vit22b_gpt175b, 1536 GPUs, printed sizes", ["Optimus, whole actions"]),
        ("optimus_vit22b_gpt175b, 3072 GPUs, printed sizes", ["Optimus, whole actions"]),
        ("disttrain_mllm_72b, 160 GPUs, printed sizes", ["PipeWeaver", "DistTrain"]),
    ]
    for case, methods in compared:
        steps = {m.removeprefix("step, "): s for (c, m), s in found.items() if c == case}
        (chain,) = (s for m, s in steps.items() if m.startswith("Megatron-LM balanced"))
        ratios = [
            next(s for m, s in steps.items() if m.startswith(method)) / chain for method in methods
        ]
        assert " and ".join(f"{ratio:.2f}" for ratio in ratios) + " x" in page, (case, ratios)
