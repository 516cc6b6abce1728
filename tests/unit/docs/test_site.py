"""The site: every page is in its navigation, and it builds without a warning where Zensical is."""

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
    return runpy.run_path(str(ROOT / "scripts" / "build_site.py"))["gather"]


def pages(nav):
    for entry in nav:
        for below in entry.values():
            yield from [below] if isinstance(below, str) else pages(below)


def test_every_page_is_in_the_navigation():
    listed = list(pages(CONFIG["nav"]))
    assert len(listed) == len(set(listed))
    assert all((ROOT / page).is_file() for page in listed)
    written = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert written <= set(listed), "add it to zensical.toml"


def test_what_pages_link_to_is_gathered(gather, tmp_path):
    found = {str(path) for path in gather(tmp_path)}
    assert {"README.md", "docs/get_started/own_data.md", "recipes/README.md"} <= found
    assert "docs/images/run_page.png" in found
    assert all((tmp_path / path).is_file() for path in found)
    assert set(pages(CONFIG["nav"])) <= found


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM.exists(), reason="needs the extra docs")
def test_it_builds_without_a_warning(gather):
    gather()
    command = [str(PROGRAM), "build", "--strict", "--clean", "--config-file", "zensical.toml"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    assert (ROOT / "outputs/site/index.html").exists()
    assert (ROOT / "outputs/site/search.json").exists()
