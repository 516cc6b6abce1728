"""A checkpoint that an earlier version saved.

`tests/goldens/checkpoint_2026_11_28.tar.xz` is step 2 of a run of commit bced641d with the recipe
below. `LOSSES` are the losses of steps 3 and 4 of that run.
"""

import tarfile
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_recipe import arguments, records

ARCHIVE = Path(__file__).parents[1] / "goldens" / "checkpoint_2026_11_28.tar.xz"
SIZES = {
    f"model__{module}__config__{key}": value
    for module in ("llm", "encoders__vision")
    for key, value in {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }.items()
}
CHANGES = {**SIZES, "model__llm__config__num_key_value_heads": 1, "checkpoint__interval": 2}
LOSSES = [6.914980888366699, 6.9037604331970215]


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """Return a run directory with the old checkpoint."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "run" / "checkpoints", filter="data")
    return tmp_path / "run"


def test_old_checkpoint_resumed_gives_the_same_losses(run_dir, real_data, train_server):
    command = arguments(run_dir, real_data, **CHANGES, training__steps=4)
    codes, output = train_server.run(command, run_dir.parent / "log")
    assert codes == [0], output
    assert "resumed from" in output
    resumed = records(run_dir)
    assert [record["step"] for record in resumed] == [3, 4]
    assert [record["loss"] for record in resumed] == pytest.approx(LOSSES, rel=1e-6)


def test_old_checkpoint_saved_again_has_the_same_bits(run_dir, real_data, train_server):
    # Updates with a learning rate of 0 do not change the loaded weights.
    frozen = {"optimizer__lr": 0.0, "optimizer__weight_decay": 0.0}
    command = arguments(run_dir, real_data, **CHANGES, **frozen, training__steps=4)
    codes, output = train_server.run(command, run_dir.parent / "log")
    assert codes == [0], output
    old, new = (
        load_file(run_dir / "checkpoints" / step / "rank-00000.safetensors")
        for step in ("step-2", "step-4")
    )
    names = [name for name in old if name.startswith("model.")]
    assert len(names) > 30
    assert all(old[name].equal(new[name]) for name in names)
