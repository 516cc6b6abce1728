"""Tests of the documentation site: complete navigation, and a build without warnings."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
PROGRAM = Path(sys.executable).with_name("zensical")


@pytest.fixture
def gather():
    return runpy.run_path(str(ROOT / "scripts" / "build_site.py"))["copy_pages"]


def pages(nav):
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages(target)


def test_every_page_is_in_the_navigation():
    listed = list(pages(CONFIG["nav"]))
    assert len(listed) == len(set(listed))
    assert all((ROOT / page).is_file() for page in listed)
    existing = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert existing <= set(listed), "add it to zensical.toml"


def test_linked_files_are_gathered(gather, tmp_path):
    paths = {str(path) for path in gather(tmp_path)}
    assert {"README.md", "docs/get_started/own_data.md", "recipes/README.md"} <= paths
    assert "docs/images/run_page.png" in paths
    assert all((tmp_path / path).is_file() for path in paths)
    assert set(pages(CONFIG["nav"])) <= paths


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM.exists(), reason="requires the extra docs")
def test_site_builds_without_a_warning(gather):
    gather()
    command = [str(PROGRAM), "build", "--strict", "--clean", "--config-file", "zensical.toml"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    assert (ROOT / "outputs/site/index.html").exists()
    assert (ROOT / "outputs/site/search.json").exists()
