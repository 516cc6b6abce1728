"""A run whose validation loss does not improve is complete, and stays complete."""

import pytest
from tiny_recipe import arguments, records

from torchmm.training.checkpoint.manifest import list_steps
from torchmm.training.shutdown import read_status

pytestmark = pytest.mark.slow
CONSTANT = {"optimizer__lr": 1e-30, "optimizer__warmup_steps": 0}
CHANGES = {
    "training__steps": 20,
    "training__global_batch_size": 4,
    "training__sequence_length": 64,
    "validation__interval": 2,
    "validation__batches": 1,
    "validation__early_stopping_patience": 2,
    "checkpoint__interval": 4,
    "checkpoint__keep_best": '{metric="validation_loss"}',
    "checkpoint__export_hf": "true",
}


@pytest.fixture
def train(tmp_path, real_data, train_server):
    """Return a function that runs two ranks and returns the steps of the records."""

    def run(**changes):
        command = arguments(tmp_path / "run", real_data, **{**CHANGES, **changes})
        log = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
        codes, output = train_server.run(command, log, 2)
        assert codes == [0, 0], output
        return [record["step"] for record in records(tmp_path / "run")], output

    return run


@pytest.mark.parametrize("layout", ["pipeline", "shard"])
def test_early_stop_completes_run(train, tmp_path, layout):
    run_dir = tmp_path / "run"
    changes = {f"parallel__{layout}": 2, **CONSTANT}
    steps, output = train(**changes)
    assert steps == [1, 2, 3, 4, 5, 6]
    status = read_status(run_dir)
    assert (status.state, status.step, status.exit_code) == ("done", 6, 0)
    assert "stopped early: validation_loss has not improved in 2 validations" in status.message
    assert "at step 2" in status.message
    assert "stopped early" in output
    assert next(path.name for path in list_steps(run_dir / "checkpoints")) == "step-6"
    assert (run_dir / "hf" / "config.json").exists()
    assert (run_dir / "hf-best" / "config.json").exists()
    # The same command does no further step.
    assert train(**changes)[0] == steps
    assert read_status(run_dir).message == status.message
    # A higher patience continues.
    assert train(**changes, validation__early_stopping_patience=3)[0] == [*range(1, 9)]
    assert read_status(run_dir).step == 8


def test_improving_run_is_not_stopped(train, tmp_path):
    steps, _ = train(parallel__pipeline=2, training__steps=8)
    assert steps == [*range(1, 9)]
    assert read_status(tmp_path / "run").message == ""
