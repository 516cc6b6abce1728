"""The first error is the reported error."""

import logging

import pytest

from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.training import shutdown
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.shutdown import (
    closing_on_exit,
    read_status,
    startup_errors,
    training_errors,
    write_failure,
)

FULL = 28, "No space left on device"


@pytest.fixture(autouse=True)
def propagating_logger(monkeypatch):
    """Replace the logger of runs, which does not propagate records."""
    monkeypatch.setattr(shutdown, "logger", logging.getLogger(__name__))


def fail() -> None:
    raise OSError(*FULL)


def test_error_of_closing_preserves_first_error(caplog):
    with pytest.raises(CheckpointError, match="first"), closing_on_exit(fail):
        raise CheckpointError("first")
    assert "No space left on device" in caplog.text


def test_error_of_closing_is_raised():
    with pytest.raises(OSError, match="No space"), closing_on_exit(fail):
        pass


@pytest.mark.parametrize("name", ["run/metrics.jsonl", "run"])
def test_only_run_directory_error_is_config_error(tmp_path, name):
    raises = pytest.raises(ConfigError, match=f"output_dir = .*{name}: No space")
    with raises, startup_errors(tmp_path / "run"):
        raise OSError(*FULL, str(tmp_path / name))
    for error in (OSError(*FULL, str(tmp_path / "weights")), ConnectionResetError("peer")):
        with pytest.raises(type(error)) as caught, startup_errors(tmp_path / "run"):
            raise error
        assert caught.value is error


def test_full_disk_ends_training_like_failed_save(tmp_path):
    inside = OSError(5, "Input/output error", str(tmp_path / "run/a"))
    for error in (OSError(*FULL), inside, RuntimeError("I/O error: No space (os error 28)")):
        with pytest.raises(CheckpointError, match="free space"), training_errors(tmp_path / "run"):
            raise error
    outside = OSError(5, "Input/output error", "/elsewhere")
    for error in (ConnectionResetError("peer"), outside, ValueError("(os error 2)")):
        with pytest.raises(type(error)) as caught, training_errors(tmp_path / "run"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("error", [CheckpointError("first"), ValueError("first")])
def test_unwritable_status_preserves_first_error(tmp_path, monkeypatch, caplog, error):
    directory = CheckpointDirectory(tmp_path / "checkpoints", logging.getLogger())
    directory.acquire_lock()
    with monkeypatch.context() as context:
        context.setattr(shutdown, "write_status", lambda *arguments: fail())
        write_failure(tmp_path, error, 3, 0, directory)
    assert "STATUS.json" in caplog.text and read_status(tmp_path) is None
    write_failure(tmp_path, error, 3, 0, directory)
    assert "first" in read_status(tmp_path).message
    directory.release()
