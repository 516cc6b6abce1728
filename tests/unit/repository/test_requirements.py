"""The files in requirements/: complete, within pyproject's bounds, with hashes of all files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def wanted(lock: Path) -> list[Requirement]:
    """What pyproject asks for directly."""
    extras = PROJECT["optional-dependencies"]
    left_out = {"lock", "docs"} if lock.stem.endswith("-test") else {"lock", "docs", "test"}
    lines = [line for name, own in extras.items() if name not in left_out for line in own]
    return [Requirement(line) for line in (*PROJECT["dependencies"], *lines)]


def entries(lock: Path) -> dict[str, list[tuple[Requirement, int]]]:
    """By package: versions, which may differ with Python and system; how many hashes each has."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    for entry in re.split(r"\n(?=[a-z0-9])", lock.read_text())[1:]:
        requirement = Requirement(entry.partition(" \\\n")[0])
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, len(hashes)))
    return found


def test_every_supported_torch_has_one() -> None:
    torch = next(r for r in wanted(LOCKS[0]) if r.name == "torch")
    minors = {f"2.{minor}" for minor in range(10, 40) if torch.specifier.contains(f"2.{minor}.0")}
    assert {lock.stem.removeprefix("torch-").removesuffix("-test") for lock in LOCKS} == minors


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_packages_are_within_bounds_and_have_hashes(lock: Path) -> None:
    found = entries(lock)
    assert all(count > 0 for versions in found.values() for _, count in versions)
    for requirement in wanted(lock):
        versions = found[canonicalize_name(requirement.name)]
        for version, _ in versions:
            (pinned,) = version.specifier
            assert pinned.operator == "=="
            assert requirement.specifier.contains(pinned.version), (str(requirement), str(version))
    ((torch, _),) = found["torch"]
    minor = lock.stem.removeprefix("torch-").removesuffix("-test")
    assert str(torch.specifier).startswith(f"=={minor}.")
