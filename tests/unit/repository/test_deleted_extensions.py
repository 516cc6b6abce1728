"""Tests of deleted extensions: the core and the remaining extensions still work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_structure import (
    EXTENSION_IMPORTS,
    PROGRAMS,
    ROOT,
    extension_of,
    short,
    torchmm_imports,
)
from tiny_recipe import QUICKSTART, arguments, new_index, records

EXTENSIONS = [
    "balance",
    *sorted(f.parent.name for f in (ROOT / "torchmm/extensions").glob("*/__init__.py")),
]
CORE_TESTS = (
    "common",
    "recipe",
    "models",
    "data",
    "parallel",
    "pipelining",
    "costs",
    "planning",
    "training",
)
IMPORT_ALL = """
import importlib, sys
names, missing = sys.argv.pop(1), []
for name in names.split():
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("torchmm"):
            missing.append(f"{name}: {error}")
if missing or len(sys.argv) == 1:
    sys.exit("\\n".join(missing))
from torchmm.commands.train import main
sys.exit(main())
"""
"""Program that imports modules and trains, unless a module requires a deleted module."""

COPY_ONLY = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
"""
"""`sitecustomize.py` of a copy, because an editable installation would find deleted modules."""

TWO_CASES = """
from collections import Counter

import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    seen, kept = Counter(), []
    for item in items:
        function = item.nodeid.partition("[")[0]
        seen[function] += 1
        if seen[function] <= 2:
            kept.append(item)
    items[:] = kept
"""
"""Plugin that selects two cases of each test, because most cases load the same modules."""

pytestmark = [pytest.mark.campaign, pytest.mark.slow, pytest.mark.timeout(3600)]


def dependents(deleted: set[str]) -> set[str]:
    """Return the extensions that import deleted extensions, directly or indirectly."""
    dependent: set[str] = set()
    remaining = deleted
    while remaining:
        remaining = {name for name, needed in EXTENSION_IMPORTS.items() if needed & remaining}
        remaining -= dependent
        dependent |= remaining
    return dependent


def test_dependents_follow_declared_imports():
    assert dependents({"balance"}) == {"reports"}
    assert dependents({"evaluation"}) == {"generation"}
    assert dependents({"reports"}) == set()


def copy_repository(target: Path, *deleted: str) -> Path:
    """Copy the tracked files and compiled modules, then delete extensions and their tests."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for compiled in (ROOT / "torchmm").rglob("__pycache__/*.pyc"):
        (target / compiled.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(compiled, target / compiled.relative_to(ROOT))
    for extension in deleted:
        folder = extension if extension == "balance" else f"extensions/{extension}"
        shutil.rmtree(target / "torchmm" / folder)
        shutil.rmtree(target / "tests/unit" / folder, ignore_errors=True)
    (target / "sitecustomize.py").write_text(COPY_ONLY)
    return target


def run_python(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package of the copy."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )


def train_losses(copy: Path, run_dir: Path, data: Path, modules: list[str]) -> list[float]:
    """Import modules, train two steps in the same process, and return the losses."""
    command = arguments(run_dir, data, training__steps=2, **new_index(run_dir))
    command[command.index(str(QUICKSTART))] = str(copy / QUICKSTART.relative_to(ROOT))
    result = run_python(copy, "-c", IMPORT_ALL, " ".join(modules), *command)
    assert result.returncode == 0, result.stdout + result.stderr
    return [record["loss"] for record in records(run_dir)]


@pytest.fixture(scope="module")
def losses(tmp_path_factory, real_data) -> list[float]:
    """Return the losses with all extensions installed."""
    losses_ = train_losses(ROOT, tmp_path_factory.mktemp("complete") / "run", real_data, [])
    assert len(losses_) == 2
    return losses_


def independent_modules(copy: Path, deleted: set[str]) -> list[str]:
    """Return all modules except dependents and commands that import deleted extensions."""
    names = []
    for file in sorted((copy / "torchmm").rglob("*.py")):
        original = ROOT / file.relative_to(copy)
        name = ".".join(file.relative_to(copy).with_suffix("").parts).removesuffix(".__init__")
        is_program = name.startswith("torchmm.commands.") or short(original) in PROGRAMS
        needs = deleted & {extension_of(each) for each in torchmm_imports(original)}
        if name.endswith("__main__") or (is_program and needs):
            continue
        if extension_of(name) not in dependents(deleted):
            names.append(name)
    return names


@pytest.mark.parametrize(
    "deleted", [*({name} for name in EXTENSIONS), set(EXTENSIONS)], ids=[*EXTENSIONS, "all"]
)
def test_core_works_without_extension(deleted, tmp_path, losses, real_data):
    copy = copy_repository(tmp_path / "copy", *deleted)
    modules = independent_modules(copy, deleted)
    assert train_losses(copy, tmp_path / "run", real_data, modules) == losses


def test_deleted_module_fails_imports(tmp_path):
    """Check as a negative control that modules of the core are required."""
    copy = copy_repository(tmp_path / "copy", "reports")
    (copy / "torchmm/recipe/section.py").unlink()
    modules = "torchmm.recipe.recipe torchmm.extensions.reports.extension"
    result = run_python(copy, "-c", IMPORT_ALL, modules)
    assert result.returncode == 1
    assert "torchmm.recipe.recipe: No module named 'torchmm.recipe.section'" in result.stderr
    assert "No module named 'torchmm.extensions.reports'" in result.stderr


def test_core_tests_pass_without_extensions(tmp_path, real_data):
    copy = copy_repository(tmp_path / "copy", *EXTENSIONS)
    (copy / "data").symlink_to(real_data.resolve())
    folders = [f"tests/unit/{name}" for name in CORE_TESTS]
    (copy / "two_cases.py").write_text(TWO_CASES)
    options = ["-q", "-p", "two_cases", "-m", "not campaign and not survey"]
    result = run_python(copy, "-m", "pytest", *options, *folders)
    assert result.returncode == 0, result.stdout[-20_000:]
