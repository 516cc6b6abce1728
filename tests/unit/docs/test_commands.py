"""Tests of the commands on pages and in recipes: valid arguments and valid recipes.

`CHECKS` defines how the commands of each program are checked. A command without a row in `CHECKS`
fails. The tests train nothing: they start a program in this process and stop it after it has parsed
its arguments. Recipes are read as train.py reads them, with the overrides and the number of ranks
of the command. Commands in `RUN` are executed.
"""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from torchmm.commands.main import COMMANDS
from torchmm.common.errors import ConfigError
from torchmm.recipe.read import load_recipe

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IN_RECIPE = re.compile(r"^#+ +((?:torchrun|python|\./scripts/).*?)(?: {2,}\(.*)?$", re.MULTILINE)
STAND_INS = {
    "recipes/mine.toml": "recipes/quickstart.toml",
    "recipes/lora.toml": "recipes/zoo/qwen3_vl_8b_lora.toml",
    "recipes/connector.toml": "recipes/zoo/llava_1_5_7b_connector.toml",
    "recipes/instruct.toml": "recipes/zoo/llava_1_5_7b.toml",
    "mine.toml": "recipes/quickstart.toml",
    "recipe.toml": "recipes/quickstart.toml",
    "planned.toml": "recipes/papers/disttrain_mllm_72b.toml",
    "RECIPE": "recipes/quickstart_disaggregated.toml",
    "recipes/zoo/NAME.toml": "recipes/zoo/qwen3_vl_8b.toml",
    "recipes/tiny/NAME.toml": "recipes/tiny/qwen3_vl.toml",
}
"""Files of a reader, and the recipe of the repository that replaces them."""
MISSING = re.compile(r"no such (file or )?directory; (run|prepare|train|correct)")
RUN = ("python train.py --list-recipes", "python scripts/build_site.py --pages")
"""Commands of a second or two, which are executed."""
NUMBERS = {"N": "16"}


class Parsed(Exception):  # noqa: N818 - an outcome, not a failure
    """Outcome of parsing: arguments of a program, and `rest`, the overrides of a recipe."""

    def __init__(self, values: argparse.Namespace, rest: list[str]) -> None:
        super().__init__()
        self.values, self.rest = values, rest


def commands_in(text: str, recipe: bool = False) -> Iterator[str]:
    blocks = IN_RECIPE.findall(text) if recipe else BLOCK.findall(text)
    for block in blocks:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield " ".join(line.split())


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def all_commands() -> dict[str, str]:
    """Return all commands, each with a file that contains it."""
    commands: dict[str, str] = {}
    for file in tracked("*.md", "recipes/*.toml"):
        for command in commands_in(file.read_text(), file.suffix == ".toml"):
            commands.setdefault(command, str(file.relative_to(ROOT)))
    return commands


def parse(path: str, arguments: list[str], module: bool = False) -> Parsed:
    """Return the arguments as parsed by the program.

    Raises:
        AssertionError: The parser rejected the arguments, or the program parsed nothing.
    """
    file = ROOT / (f"{path.replace('.', '/')}.py" if module else path)
    command = r"ArgumentParser\(|make_parser\(|_parser\(|torchmm\.(commands|extensions)"
    assert re.search(command, file.read_text()), path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *arguments])
        patch.delitem(
            sys.modules, path, raising=False
        )  # otherwise, runpy warns about imported modules
        patch.syspath_prepend(str(file.parent))
        if module:
            return parsed_by(patch, lambda: runpy.run_module(path, run_name="__main__"))
        return parsed_by(patch, lambda: runpy.run_path(str(ROOT / path), run_name="__main__"))


def parsed_by(patch: pytest.MonkeyPatch, program: Callable[[], object]) -> Parsed:
    """Run a program until its parser has parsed the arguments, and return the result.

    Raises:
        AssertionError: The parser rejected the arguments, or the program parsed nothing.
    """
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def parse_known(self, args=None, namespace=None):
        raise Parsed(*parse_known_args(self, args, namespace))

    def parse_all(self, args=None, namespace=None):
        values, rest = parse_known_args(self, args, namespace)
        if rest:
            self.error(f"unknown: {rest}")
        raise Parsed(values, [])

    patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known)
    patch.setattr(argparse.ArgumentParser, "parse_args", parse_all)
    try:
        program()
    except Parsed as parsed:
        return parsed
    except SystemExit as stop:
        raise AssertionError(f"exit code {stop.code}") from None
    raise AssertionError("the program parses nothing")


def check_program(words: list[str], ranks: int | None = None) -> None:
    """Check `SCRIPT ARGUMENTS` or `-m MODULE ARGUMENTS`, and the recipe of `--config`."""
    module = words[0] == "-m"
    path, *arguments = words[1:] if module else words
    parsed = parse(path, [NUMBERS.get(word, word) for word in arguments], module)
    config = getattr(parsed.values, "config", None)
    if config is None:
        assert not parsed.rest, parsed.rest
        return
    stand_in = STAND_INS.get(str(config))
    if path != "train.py" or stand_in is not None:
        ranks = None  # planning needs no ranks, and replacements have different degrees
    elif ranks is None:
        ranks = getattr(parsed.values, "world_size", None) or 1
    try:
        load_recipe(str(ROOT / (stand_in or config)), parsed.rest, ranks)
    except ConfigError as error:
        # Ignore missing data and models that preceding commands create.
        problems = [problem for problem in error.problems if not MISSING.search(problem)]
        assert not problems, problems


def check_torchrun(words: list[str]) -> None:
    """Check the arguments of torchrun, then the program that it starts, on its number of ranks."""
    options = get_args_parser().parse_args([word for word in words if word != "..."])
    nodes, each = int(options.nnodes.split(":")[-1]), int(options.nproc_per_node)
    has_ranks = any(word.startswith("--nproc") for word in words)
    ranks = nodes * each if has_ranks else 2
    if options.module:
        assert options.training_script == "torchmm"
        check_torchmm(options.training_script_args, ranks)
        return
    check_program([options.training_script, *options.training_script_args], ranks)


def check_torchmm(words: list[str], ranks: int | None = None) -> None:
    """Check `torchmm COMMAND ARGUMENTS` with the program of the command."""
    name, *arguments = words
    module, _ = COMMANDS[name]
    command = importlib.import_module(f"torchmm.commands.{module}")
    with pytest.MonkeyPatch.context() as patch:
        parsed = parsed_by(patch, lambda: command.main(arguments, f"torchmm {name}"))
    config = getattr(parsed.values, "config", None)
    if config is None:
        assert not parsed.rest, parsed.rest
        return
    load_recipe(STAND_INS.get(config, config), parsed.rest, None if config in STAND_INS else ranks)


def check_sbatch(words: list[str]) -> None:
    """Check the program that Slurm starts. The options of Slurm are not checked."""
    if "--wrap" in words:
        check(words[words.index("--wrap") + 1].replace("$SLURM_ARRAY_TASK_ID", "3"))
        return
    index = next(n for n, word in enumerate(words) if word.endswith(".sh"))
    assert (ROOT / words[index]).exists()
    nodes = int(words[words.index("--nodes") + 1])
    check_program(["train.py", *words[index + 1 :]], 8 * nodes)


def check_pytest(words: list[str]) -> None:
    """Check that the test files exist. CI runs them with all tests."""
    files = [word for word in words if word.startswith("tests/")]
    assert all((ROOT / word.partition("::")[0]).exists() for word in files), words


def check_pip(words: list[str]) -> None:
    """Check that extras are declared and requirement files exist. Ignore other packages."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in words:
        if found := re.fullmatch(r"(?:\.|torchmm)\[([\w,]+)\]", word):
            assert set(found[1].split(",")) <= set(extras), word
        if word.startswith("requirements/"):
            assert (ROOT / word).exists(), word


def check_script(words: list[str]) -> None:
    """Check that the file exists, is executable, and is valid for bash."""
    file = ROOT / words[0]
    assert file.stat().st_mode & 0o100, file
    subprocess.run(["bash", "-n", str(file)], check=True)


def check_nothing(words: list[str]) -> None:
    """Accept a program of the system, which reads results of preceding commands."""


CHECKS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "python -m pytest": (check_pytest, "files exist; CI runs them"),
    "python": (check_program, "arguments with its parser; its recipe with overrides and ranks"),
    "torchrun": (check_torchrun, "torchrun's parser, then as `python` on that many ranks"),
    "torchmm": (check_torchmm, "as `python`; `torchrun -m torchmm` on that many ranks"),
    "sbatch": (check_sbatch, "the started program, as `python` on 8 ranks a node"),
    "pip": (check_pip, "extras and lock files exist"),
    "./scripts/quickstart.sh": (
        check_script,
        "bash reads it; tests/unit/repository and CI run parts",
    ),
    "./scripts/test.sh": (check_script, "bash reads it; CI runs it"),
    "./scripts/lmms_eval.sh": (check_script, "bash reads it"),
    ". .venv/bin/activate": (check_nothing, "none: made by `scripts/environment.sh`"),
    "export": (check_nothing, "none: sets a variable"),
    "tail": (check_nothing, "none: a program of the system"),
    "pip-audit": (check_nothing, "none: not installed here"),
    "cyclonedx-py": (check_nothing, "none: not installed here"),
}


def check(command: str) -> None:
    """Check a command and the commands inside of `$( )`.

    Raises:
        AssertionError: The command would fail, or its program has no row in `CHECKS`.
    """
    for inner in re.findall(r"\$\((.*?)\)", command):
        check(inner)
    words = shlex.split(re.sub(r"\$\(.*?\)", "", command), comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    line = shlex.join(words)
    if line in RUN:
        ran = subprocess.run(
            [sys.executable, *words[1:]], cwd=ROOT, check=True, text=True, stdout=-1
        )
        assert ran.stdout
        return
    row = next((row for row in CHECKS if line == row or line.startswith(f"{row} ")), None)
    assert row is not None, f"CHECKS has no row for {words[0]!r}; add one"
    skipped = 0 if CHECKS[row][0] is check_script else len(row.split())
    CHECKS[row][0](words[skipped:])


@pytest.mark.parametrize("command", all_commands())
def test_every_documented_command_is_valid(command):
    check(command)


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --config recipes/gone.toml",
        "python scripts/simulate.py --config recipes/mine.toml --training.steps many",
        "python train.py --config recipes/quickstart.toml --training.stepz 3",
        "torchrun --nproc-per-node 3 train.py --config recipes/quickstart.toml",
        "torchrun --nprocs 2 train.py --config recipes/quickstart.toml",
        "python scripts/show_run.py outputs/mine --pages-too",
        "python scripts/gone.py",
        "python -m pytest tests/gone.py",
        "pip install -e '.[gone]'",
        "./scripts/gone.sh",
        "make everything",
        "torchmm gone",
        "torchmm train zoo/gone",
        "torchmm train quickstart --training.stepz 3",
        "torchmm simulate quickstart --gpu-count 3",
        "torchrun --nproc-per-node 3 -m torchmm train quickstart",
        "sbatch --nodes 1 --wrap 'python scripts/gone.py'",
    ],
)
def test_invalid_commands_are_detected(command):
    with pytest.raises((Exception, SystemExit)):
        check(command)


def test_commands_are_extracted_from_pages():
    text = "```bash\n# why\nA=1 python a.py \\\n    --b c   # d\n\ntail x\n```\n```toml\nx\n```\n"
    assert list(commands_in(text)) == ["A=1 python a.py --b c # d", "tail x"]
    recipe = "# What it is.\n#\n#   torchrun x --y z    (done by it)\nbase = 1\n"
    assert list(commands_in(recipe, recipe=True)) == ["torchrun x --y z"]
    assert len(all_commands()) > 100
    assert {command.partition(" #")[0].strip() for command in all_commands()} >= set(RUN)


SHOWN = re.compile(r"```toml\n(base = .*?)```", re.DOTALL)
RECIPES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs" / "get_started").glob("*.md"))
    for number, block in enumerate(
        re.findall(r"```toml\n(base = .*?)```", page.read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_documented_recipe_is_valid(recipe, tmp_path):
    """Check recipes without data and models, which only readers have."""
    assert RECIPES
    path = tmp_path / "mine.toml"
    path.write_text(recipe.replace('base = "', f'base = "{ROOT}/recipes/', 1))
    try:
        ranks = 2 if 'base = "tiny/' in recipe else 1 if "lora" in recipe else 16
        load_recipe(path, [], ranks)
    except ConfigError as error:
        problems = [problem for problem in error.problems if not MISSING.search(problem)]
        assert not problems, problems
