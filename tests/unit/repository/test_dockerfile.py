"""Tests of scripts/launch/Dockerfile: required files, locked versions and user."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILE = ROOT / "scripts/launch/Dockerfile"
BUILDER = next((name for name in ("docker", "podman") if shutil.which(name)), None)
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the file with their arguments."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]  # type: ignore[misc]


def has_engine() -> bool:
    if BUILDER is None:
        return False
    return subprocess.run([BUILDER, "info"], capture_output=True, check=False).returncode == 0


def test_dockerfile_copies_existing_files():
    lines = instructions()
    assert {name for name, _ in lines} <= INSTRUCTIONS and lines[0][0] == "FROM"
    copied = [arguments.split()[:-1] for name, arguments in lines if name == "COPY"]
    sources = [source for names in copied for source in names]
    # gpu_check.py imports cases from benchmarks.
    assert {"torchmm", "scripts", "benchmarks", "recipes", "train.py", "setup.py"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_dockerfile_installs_locked_versions_as_user():
    lines = instructions()
    commands = " ".join(arguments for name, arguments in lines if name == "RUN")
    (lock,) = re.findall(r"--require-hashes -r (\S+)", commands)
    assert (ROOT / lock).is_file()
    (user,) = [arguments for name, arguments in lines if name == "USER"]
    assert int(user) > 0


@pytest.mark.campaign
@pytest.mark.skipif(not has_engine(), reason="requires a running Docker or Podman engine")
def test_image_builds_and_lists_recipes():
    assert BUILDER is not None
    name = "torchmm-test"
    subprocess.run([BUILDER, "build", "-f", FILE, "-t", name, ROOT], check=True)
    listed = subprocess.run([BUILDER, "run", "--rm", name], capture_output=True, check=True)
    assert b"quickstart" in listed.stdout
