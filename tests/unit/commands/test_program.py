"""Tests of the program `torchmm`: dispatch, help, and public functions of `import torchmm`."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from slowed import HEAVY

import torchmm
from torchmm.commands.main import COMMANDS, main
from torchmm.common.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[3]


def test_help_lists_commands_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "torchmm", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & {*HEAVY, "pydantic", "rich", "numpy"}
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_shows_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchmm", name, "--help"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: torchmm {name} ")


def test_version_option_prints_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchmm", "--version"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"torchmm {torchmm.__version__}\n"


def test_program_without_command_shows_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchmm"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert "\ncommands:\n" in capsys.readouterr().out


def test_recipes_command_ignores_closed_pipe():
    command = [sys.executable, "-m", "torchmm", "recipes"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as listing:
        assert listing.stdout is not None and listing.stderr is not None
        listing.stdout.close()
        assert listing.stderr.read() == b""
    assert listing.returncode == 0


def test_scripts_are_thin_and_complete():
    modules = {module for module, _ in COMMANDS.values()} - {"dry_run", "recipes", "train"}
    for file in [ROOT / "train.py", *(ROOT / "scripts" / f"{name}.py" for name in modules)]:
        command = importlib.import_module(f"torchmm.commands.{file.stem}")
        assert f"from {command.__name__} import main\n" in file.read_text()
        assert len(file.read_text().splitlines()) < 20


def test_unknown_command_exits_with_names(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchmm", "trian"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "'train'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "extension"),
    [("evaluate", "evaluation"), ("show", "reports"), ("prepare-data", "demo_data")],
)
def test_command_names_missing_extension(command, extension, monkeypatch, capsys):
    folder = f"torchmm.extensions.{extension}"
    for name in [name for name in sys.modules if name.startswith(folder)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"torchmm.commands.{COMMANDS[command][0]}", raising=False)
    monkeypatch.setitem(sys.modules, folder, None)
    monkeypatch.setattr(sys, "argv", ["torchmm", command, "--help"])
    assert main() == 2
    assert f'the extension "{extension}" is not installed' in capsys.readouterr().err


def test_missing_module_of_the_core_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmm.commands.plan", None)
    monkeypatch.setattr(sys, "argv", ["torchmm", "plan", "--help"])
    with pytest.raises(ModuleNotFoundError, match=r"torchmm\.commands\.plan"):
        main()


@pytest.mark.parametrize("option", [[], ["--config"]], ids=["first argument", "option"])
def test_recipe_is_first_argument_or_option(option, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = [*option, "quickstart", "--training.steps", "77", "--print-config"]
    monkeypatch.setattr(sys, "argv", ["torchmm", "train", *words])
    assert main() == 0
    assert "steps = 77\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["torchmm", "train", "--print-config"])
    with pytest.raises(SystemExit):
        main()
    assert "no recipe; use RECIPE" in capsys.readouterr().err


def test_public_functions_reject_invalid_arguments(tmp_path):
    recipe = torchmm.load_recipe("tiny/siglip2_qwen3", ["--parallel.pipeline", "3"])
    with pytest.raises(ConfigError, match="pipeline"):
        torchmm.train(recipe)
    with pytest.raises(ConfigError, match="gpus = 0"):
        torchmm.plan(recipe, gpus=0)
    with pytest.raises(ConfigError, match="dtype = 'int8' is invalid"):
        torchmm.export(tmp_path, dtype="int8")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        torchmm.export(tmp_path)
