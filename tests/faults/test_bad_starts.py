"""Invalid recipes and environments are rejected by name before initialization.

Every entry is one injection. Most are read in this process. Some run train.py, which maps errors to
exit codes.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from tiny_recipe import arguments, overrides

from torchmm.common.errors import ConfigError
from torchmm.common.processes import LaunchEnvironment, read_launch_environment
from torchmm.recipe.read import load_recipe
from torchmm.training.shutdown import read_status

DYING = Path(__file__).with_name("dying_train.py")
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
DEEP = "[" * 1000 + "]" * 1000

RECIPES: dict[str, tuple[str, list[str], list[str]]] = {
    # error: (lines of the recipe, overrides, text of the message)
    "unknown key": ("[optimizer]\nlearning_rate = 1.0", [], ["optimizer.learning_rate", "lr"]),
    "unknown section": ("[optimiser]\nlr = 1.0", [], ["optimiser"]),
    "wrong type": ('[training]\nsteps = "many"', [], ["training.steps", "integer"]),
    "number in quotes": ('[optimizer]\nlr = "1e-3"', [], ["optimizer.lr", "remove the quotes"]),
    "fraction for a number": ("[training]\nsteps = 1.5", [], ["training.steps", "integer"]),
    "bad choice": ('[training]\ndtype = "float17"', [], ["training.dtype", "bfloat16"]),
    "key twice": ("[training]\nsteps = 1\nsteps = 2", [], ["line 4"]),
    "no TOML": ("[training\nsteps = 1", [], ["invalid TOML"]),
    "negative": ("[training]\nsteps = -1", [], ["training.steps", ">= 1"]),
    "zero": ("[training]\nglobal_batch_size = 0", [], ["training.global_batch_size"]),
    "infinite": ("[optimizer]\nlr = inf", [], ["optimizer.lr", "finite"]),
    "no number": ("[optimizer]\nlr = nan", [], ["optimizer.lr", "finite"]),
    "infinite seconds": ("[data]\ntimeout_s = inf", [], ["data.timeout_s", "finite"]),
    "beyond 64 bits": (
        f"[training]\nsteps = {'9' * 400}",
        [],
        ["training.steps", "64 bits"],
    ),
    "5000 digits": (f"[training]\nsteps = {'9' * 5000}", [], ["not a recipe", "digits"]),
    "deep arrays": (f"[data]\nsources = {DEEP}", [], ["not a recipe", "nested"]),
    "deep tables": (f"[data]\nx = {'{a=' * 1000}1{'}' * 1000}", [], ["not a recipe", "nested"]),
    "deep override": ("", [f"--data.sources={DEEP}"], ["command line", "data.sources", "nested"]),
    "override without value": ("", ["--training.steps"], ["training.steps", "has no value"]),
    "no override": ("", ["training.steps=3"], ["not an override"]),
    "2000 unknown keys": (
        "[data]\n" + "".join(f"unknown_{n} = 1\n" for n in range(2000)),
        [],
        ["data.unknown_0", " more"],
    ),
    "base that is missing": ('base = "nowhere.toml"', [], ["nowhere.toml", "check the path"]),
    "data that are missing": (
        '[[data.sources]]\npath = "nowhere/at/all"',
        [],
        ["nowhere/at/all", "no such file"],
    ),
    "name that leads elsewhere": ('name = "../x"', [], ["name", "directory name"]),
    "checkpoint that is missing": (
        '[checkpoint]\nresume = "nowhere"',
        [],
        ["checkpoint.resume", "is not a directory"],
    ),
    "staging without upload": (
        '[checkpoint]\nstaging_dir = "/tmp/x"',
        [],
        ["checkpoint.staging_dir", "requires checkpoint.remote_dir"],
    ),
    "upload with wildcards": (
        '[checkpoint]\nremote_dir = "s3://bucket/*"',
        [],
        ["checkpoint.remote_dir", "wildcards"],
    ),
    "password in an address": (
        '[checkpoint]\nremote_dir = "s3://me:hunter2@bucket/runs"',
        [],
        ["checkpoint.remote_dir", "credential"],
    ),
    "signature in an address": (
        '[[data.sources]]\npath = "https://host/a.tar?X-Amz-Signature=hunter2"',
        [],
        ["data.sources[0].path", "credential"],
    ),
    "token to another machine": (
        '[data.producers]\naddresses = ["10.0.0.9:7411"]',
        [],
        ["data.producers.addresses[0]", "requires encryption"],
    ),
    "sizes that do not make the ranks": (
        "",
        ["--parallel.pipeline=3", "--parallel.shard=1"],
        ["parallel", "is not equal to 2 ranks"],
    ),
    "batch that does not divide": (
        "",
        ["--training.global_batch_size=7", "--training.microbatch_size=2"],
        ["training.global_batch_size", "must be a multiple"],
    ),
    "nothing left to train": (
        "",
        ['--freeze.modules=["llm", "vision", "vision.connector"]'],
        ["freeze.modules", "leaves no module to train"],
    ),
    "unknown module": ('[freeze]\nmodules = ["visoin"]', [], ["freeze.modules", "vision"]),
    "validation without data": (
        "[data]\nvalidation = []\n[validation]\nnum_samples = 2",
        [],
        ["validation.num_samples", "requires validation data"],
    ),
}

ENVIRONMENTS: dict[str, tuple[dict[str, str], str]] = {
    "RANK = x": ({"RANK": "x"}, "RANK = 'x'"),
    "RANK = -1": ({"RANK": "-1"}, "RANK = '-1'"),
    "RANK = ²": ({"RANK": "²"}, "RANK = '²'"),
    "RANK beyond": ({"RANK": "2"}, "RANK = 2 is not below WORLD_SIZE = 2"),
    "WORLD_SIZE = two": ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
    "WORLD_SIZE = 0": ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0'"),
    "LOCAL_RANK empty": ({"LOCAL_RANK": ""}, "LOCAL_RANK = ''"),
    "no MASTER_ADDR": ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    "MASTER_PORT = x": ({"MASTER_PORT": "x"}, "MASTER_PORT = 'x'"),
    "MASTER_PORT = 70000": ({"MASTER_PORT": "70000"}, "MASTER_PORT = 70000 is not a port"),
}
RANK_ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
RANK_ENVIRONMENT["MASTER_ADDR"] = "127.0.0.1"


@pytest.mark.parametrize("error", RECIPES)
def test_bad_recipe_error_names_key(tmp_path, error):
    lines, changes, expected = RECIPES[error]
    (tmp_path / "bad.toml").write_text(f'base = "{QUICKSTART}"\n{lines}\n'.replace(
        f'base = "{QUICKSTART}"\nbase', "base"
    ))  # fmt: skip
    began_s = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "bad.toml", changes, 2)
    message = str(caught.value)
    assert time.monotonic() - began_s < 10 and len(message) < 60_000
    assert caught.value.exit_code == 2
    assert [text for text in expected if text not in message] == [], message
    assert "hunter2" not in message


def test_unmodified_recipe_is_valid(real_data, tmp_path):
    """Control: the recipe is valid without the injected errors."""
    load_recipe(QUICKSTART, overrides(tmp_path / "run", real_data), 2)


@pytest.mark.parametrize("error", ENVIRONMENTS)
def test_bad_environment_error_names_variable(error):
    changes, words = ENVIRONMENTS[error]
    with pytest.raises(ConfigError, match="environment: ") as caught:
        read_launch_environment({**RANK_ENVIRONMENT, **changes})
    assert words in str(caught.value) and "docs/guides/cluster.md" in str(caught.value)


def test_valid_environments_are_parsed():
    assert read_launch_environment(RANK_ENVIRONMENT) == LaunchEnvironment(1, 2)
    assert read_launch_environment({}) == LaunchEnvironment(0, 1)
    assert read_launch_environment(
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "x"}
    ) == LaunchEnvironment(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("error", ["RANK = x", "WORLD_SIZE = two", "no MASTER_ADDR"])
def test_bad_environment_exits_with_2(tmp_path, real_data, train_server, error):
    changes, words = ENVIRONMENTS[error]
    command = arguments(tmp_path / "run", real_data)
    run = train_server.start(command, tmp_path / "logs", ranks=2, **changes)
    assert run.wait() == [2, 2]
    output = run.output(0) + run.output(1)
    assert words in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign
def test_silent_program_on_port_times_out(tmp_path, real_data, train_server):
    command = arguments(tmp_path / "run", real_data, parallel__timeout_s=2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(64)
        port = other.getsockname()[1]
        began_s = time.monotonic()
        run = train_server.start(command, tmp_path / "logs", ranks=2, MASTER_PORT=port)
        assert run.wait() == [6, 6], run.output(1)
    assert time.monotonic() - began_s < 30
    assert "Traceback" not in run.output(0) + run.output(1)
    assert read_status(tmp_path / "run").exit_code == 6


@pytest.mark.campaign
def test_rank_that_dies_during_setup_times_out(tmp_path, real_data, train_server):
    """Saves may take half an hour, but only after initialization."""
    command = arguments(tmp_path / "run", real_data, parallel__timeout_s=4)
    began_s = time.monotonic()
    run = train_server.start(command, tmp_path / "logs", ranks=2, script=DYING)
    assert run.wait() == [6, 9]
    assert time.monotonic() - began_s < 40
    assert "PeerError: rank 0 lost a peer, or could not connect to it" in run.output()
    assert "Traceback" not in run.output()
