"""Run directories that another run uses, that are full, or that are not writable."""

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from test_train_faults import wait_for_step
from tiny_recipe import arguments

from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.shutdown import Status, read_status, write_status

pytestmark = pytest.mark.slow
SHORT_RETRY = Path(__file__).with_name("impatient_train.py")
INVALID_KEY = {"model__llm__config__hiden_size": 64}


@pytest.fixture
def live_run(tmp_path) -> Iterator[Path]:
    """Return the directory of a run that another process considers active."""
    run_dir = tmp_path / "run"
    directory = CheckpointDirectory(run_dir / "checkpoints", logging.getLogger(__name__))
    directory.acquire_lock()
    write_status(run_dir, Status("running", 7, 0))
    (run_dir / "recipe.toml").write_text("name = 'other'\n")
    (run_dir / "metrics.jsonl").write_text('{"step": 7}\n')
    yield run_dir
    directory.release()


def fill(disk: Path) -> None:
    """Fill the disk completely."""
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def contents(run_dir: Path) -> dict[Path, bytes]:
    """Return all files except the lock file, which closing it would release."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_invalid", [False, True])
def test_second_run_in_directory_changes_nothing(
    live_run, tmp_path, real_data, train_server, ranks, is_invalid
):
    before = contents(live_run)
    changes = {"training__steps": 2, "optimizer__lr": 0.5, **(INVALID_KEY if is_invalid else {})}
    command = arguments(live_run, real_data, **changes)
    run = train_server.start(command, tmp_path / "logs", ranks, script=SHORT_RETRY)
    codes = run.wait()
    output = run.outputs()
    assert codes == [2 if is_invalid else 4] * ranks, output
    assert "Traceback" not in output
    if not is_invalid:
        assert output.count("in use by another run") == 1
    assert contents(live_run) == before
    assert read_status(live_run) == Status("running", 7, 0)


def test_early_config_error_is_in_status(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    write_previous_status(run_dir)
    command = arguments(run_dir, real_data, **INVALID_KEY)
    assert train_server.run(command, tmp_path / "logs", ranks=2)[0] == [2, 2]
    assert read_status(run_dir).exit_code == 2


def test_disk_too_small_for_checkpoint(disk, tmp_path, real_data, train_server):
    run_dir = disk("size=2m") / "run"
    changes = {
        "training__steps": 4,
        "checkpoint__interval": 1,
        "data__index_cache_dir": tmp_path / "i",
    }
    command = arguments(run_dir, real_data, **changes)
    codes, output = train_server.run(command, tmp_path / "logs")
    assert codes == [4] and "Traceback" not in output, output
    assert output.count("CheckpointError: cannot save") == 1
    assert re.search(r"No space left on device: \d+ bytes are required", output)
    status = read_status(run_dir)
    assert (status.state, status.exit_code) == ("failed", 4)
    assert "No space left on device" in status.message
    disk("size=64m")
    assert train_server.run(command, tmp_path / "again")[0] == [0]
    assert read_status(run_dir).state == "done"


def test_disk_that_fills_during_training(disk, tmp_path, real_data, train_server):
    run_dir = disk("size=64m") / "run"
    changes = {"training__steps": 100_000, "data__index_cache_dir": tmp_path / "index"}
    run = train_server.start(arguments(run_dir, real_data, **changes), tmp_path / "logs")
    wait_for_step(run_dir, 2)
    fill(disk("size=64m"))
    assert run.wait() == [4], run.output()
    assert "Traceback" not in run.output()
    assert f"CheckpointError: cannot write {run_dir}/metrics.jsonl: No space left" in run.output()
    status = read_status(run_dir)
    assert (status.state, status.exit_code) == ("failed", 4) and status.step > 2
    codes, output = train_server.run(arguments(run_dir, real_data, **changes), tmp_path / "again")
    assert codes == [2] and "Traceback" not in output, output
    assert "output_dir = " in output and "No space left on device" in output
    assert read_status(run_dir).exit_code == 2


def test_disk_too_small_for_export(disk, tmp_path, real_data, train_server):
    run_dir = disk("size=300k") / "run"
    changes = {"training__steps": 2, "checkpoint__export_hf": "true"}
    command = arguments(run_dir, real_data, **changes, data__index_cache_dir=tmp_path / "index")
    codes, output = train_server.run(command, tmp_path / "logs")
    assert codes == [4] and "Traceback" not in output, output
    assert read_status(run_dir).exit_code == 4


def test_incomplete_exports_are_removed_at_start(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    for name in (".hf-7.partial", ".weights-abc.partial"):
        (run_dir / name).mkdir(parents=True)
        (run_dir / name / "config.json").write_text("{}")
    (run_dir / ".hf.before").mkdir()
    command = arguments(run_dir, real_data, training__steps=2)
    codes, output = train_server.run(command, tmp_path / "logs")
    assert codes == [0], output
    assert not list(run_dir.glob(".hf*")) and not list(run_dir.glob(".weights*"))
    assert (run_dir / "hf").is_dir()  # the previous export


@pytest.mark.parametrize("ranks", [1, 2])
def test_read_only_output_directory_is_rejected(disk, tmp_path, real_data, train_server, ranks):
    run_dir = disk("size=1m") / "run"
    write_previous_status(run_dir)
    disk("ro")
    run = train_server.start(arguments(run_dir, real_data), tmp_path / "logs", ranks)
    codes = run.wait()
    output = run.outputs()
    assert codes == [2] * ranks and "Traceback" not in output, output
    assert f"output_dir = '{run_dir.parent}': cannot write {run_dir}" in output
    assert "Read-only file system or permission denied; use a writable directory" in output


@pytest.mark.parametrize("key", ["output_dir", "data__index_cache_dir"])
def test_impossible_directory_is_rejected(tmp_path, real_data, train_server, key):
    (tmp_path / "file").write_text("not a directory")
    run_dir = tmp_path / "run"
    command = arguments(run_dir, real_data)
    command.append(f"--{key.replace('__', '.')}={tmp_path / 'file' / 'below'}")
    codes, output = train_server.run(command, tmp_path / "logs")
    assert codes == [2] and "Traceback" not in output, output
    assert f"{key.replace('__', '.')} = '{tmp_path}/file/below': cannot write" in output
    assert "Not a directory" in output
    if key == "data__index_cache_dir":
        assert read_status(run_dir).exit_code == 2


def write_previous_status(run_dir: Path) -> None:
    run_dir.mkdir()
    write_status(run_dir, Status("failed", 5, 0, 3, "previous error"))
