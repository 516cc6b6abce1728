"""Tests of a wheel that is installed into a new environment and used from another directory.

The environment has no packages except a path to the packages of this interpreter, because tests
require no network. The tests therefore do not check the download of dependencies.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BUILD_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
API_PAGE = (ROOT / "docs/reference/api.md").read_text()
STEPS = '"--training.steps", "100"'
FEW_STEPS = '"--training.steps", "2", "--optimizer.warmup_steps", "0"'
RECIPE = """
base = "quickstart.toml"
name = "mine"
[training]
steps = 2
global_batch_size = 4
[optimizer]
warmup_steps = 0
[parallel]
pipeline = 1
[validation]
interval = 0
[checkpoint]
interval = 2
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the wheel."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("torchmm", "recipes"):
        shutil.copytree(ROOT / folder, source / folder, ignore=lambda *_: ["__pycache__"])
    for file in BUILD_FILES:
        shutil.copy(ROOT / file, source)
    built = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    offline = ["--quiet", "--no-index", "--no-deps"]
    command = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", built, source]
    subprocess.run(command, check=True, env=plain_environment())
    (wheel,) = built.glob("*.whl")
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, symlinks=True)
    programs = directory / "bin"
    where = [programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    printed = subprocess.run(where, check=True, capture_output=True, text=True)
    (Path(printed.stdout.strip()) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [*pip, "--python", programs / "python", "install", *offline, "--force-reinstall"]
    subprocess.run([*command, wheel], check=True, env=plain_environment())
    return programs


def plain_environment() -> dict[str, str]:
    """Return the environment without a path to the clone."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(environment: Path, directory: Path, *words: object) -> str:
    """Return the output of a program of the environment. Fail if its exit code is not 0."""
    command = [environment / str(words[0]), *map(str, words[1:])]
    done = subprocess.run(
        command,
        cwd=directory,
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_wheel_lists_recipes_and_public_functions(environment, tmp_path):
    listed = run(environment, tmp_path, "torchmm", "recipes").splitlines()
    assert {"quickstart", "zoo/llava_1_5_7b"} <= set(listed)
    assert listed == run(environment, tmp_path, "python", "-m", "torchmm", "recipes").splitlines()
    code = "import torchmm; print(torchmm.__file__, torchmm.load_recipe('zoo/smolvlm').name)"
    file, name = run(environment, tmp_path, "python", "-c", code).split()
    assert not Path(file).is_relative_to(ROOT) and name == "smolvlm"


def test_wheel_names_packages_of_extras(environment, tmp_path):
    code = (
        "import sys; from torchmm.common.errors import install_command\n"
        "for extra in sys.argv[1:]: print(install_command(extra))"
    )
    lines = run(environment, tmp_path, "python", "-c", code, *EXTRAS).splitlines()
    for needs, line in zip(EXTRAS.values(), lines, strict=True):
        words = line.replace("'", "").removeprefix("pip install ").split()
        assert [Requirement(word) for word in words] == [Requirement(need) for need in needs]


@pytest.mark.campaign
def test_wheel_simulates_and_inspects(environment, tmp_path, real_data):
    dry = run(environment, tmp_path, "torchmm", "dry-run", "zoo/llava_1_5_7b", "--world-size", 16)
    assert "-m torchmm train zoo/llava_1_5_7b" in dry and "train.py" not in dry
    write_recipe(tmp_path, real_data)
    output = run(environment, tmp_path, "torchmm", "inspect", "mine.toml", "--limit", 20)
    assert "wrote outputs/mine/data/index.html" in output


@pytest.mark.campaign
def test_wheel_trains_and_exports(environment, tmp_path, real_data):
    """Run the first example of the page on the Python API, and the program under torchrun."""
    write_recipe(tmp_path, real_data)
    torchrun = ("python", "-m", "torch.distributed.run", "--nproc-per-node", 1)
    run(environment, tmp_path, *torchrun, "-m", "torchmm", "train", "mine.toml")
    assert (tmp_path / "outputs/mine/checkpoints/step-2").is_dir()
    (example, *_) = re.findall(r"^```python\n(.*?)^```", API_PAGE, re.MULTILINE | re.DOTALL)
    assert STEPS in example
    (tmp_path / "example.py").write_text(example.replace(STEPS, FEW_STEPS))
    run(environment, tmp_path, "python", "example.py")
    assert (tmp_path / "outputs/quickstart/hf-2/config.json").is_file()


def write_recipe(directory: Path, real_data: Path) -> None:
    """Write mine.toml and a link to its data."""
    (directory / "data").symlink_to(real_data)
    (directory / "mine.toml").write_text(RECIPE)
