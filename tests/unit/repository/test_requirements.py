"""Tests of the files in `requirements`: completeness, versions and hashes."""

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


def direct_requirements(lock: Path) -> list[Requirement]:
    """Return the requirements of pyproject.toml without indirect dependencies."""
    extras = PROJECT["optional-dependencies"]
    excluded = {"lock", "docs"} if lock.stem.endswith("-test") else {"lock", "docs", "test"}
    lines = [line for name, extra in extras.items() if name not in excluded for line in extra]
    return [Requirement(line) for line in (*PROJECT["dependencies"], *lines)]


def locked_versions(lock: Path) -> dict[str, list[tuple[Requirement, int]]]:
    """Return the versions of each package with their number of hashes.

    Versions may depend on Python and the operating system.
    """
    packages: dict[str, list[tuple[Requirement, int]]] = {}
    for entry in re.split(r"\n(?=[a-z0-9])", lock.read_text())[1:]:
        requirement = Requirement(entry.partition(" \\\n")[0])
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)
        packages.setdefault(canonicalize_name(requirement.name), []).append(
            (requirement, len(hashes))
        )
    return packages


def test_every_supported_torch_has_a_lock_file() -> None:
    torch = next(r for r in direct_requirements(LOCKS[0]) if r.name == "torch")
    minors = {f"2.{minor}" for minor in range(10, 40) if torch.specifier.contains(f"2.{minor}.0")}
    assert {lock.stem.removeprefix("torch-").removesuffix("-test") for lock in LOCKS} == minors


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_locked_packages_are_within_bounds_with_hashes(lock: Path) -> None:
    packages = locked_versions(lock)
    assert all(count > 0 for versions in packages.values() for _, count in versions)
    for requirement in direct_requirements(lock):
        versions = packages[canonicalize_name(requirement.name)]
        for version, _ in versions:
            (pinned,) = version.specifier
            assert pinned.operator == "=="
            assert requirement.specifier.contains(pinned.version), (str(requirement), str(version))
    ((torch, _),) = packages["torch"]
    minor = lock.stem.removeprefix("torch-").removesuffix("-test")
    assert str(torch.specifier).startswith(f"=={minor}.")
