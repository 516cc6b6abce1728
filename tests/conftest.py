"""What tests all over the tree share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from train_server import TrainServer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Directory with the real image-caption set and its tokenizer (made by scripts/test.sh)."""
    directory = ROOT / "data"
    if not (directory / "tuxpaint_stamps" / "train").is_dir():
        pytest.skip("no real data here; run: python scripts/prepare_data.py tuxpaint_stamps")
    return directory


@pytest.fixture(scope="session")
def train_server() -> Iterator[TrainServer]:
    """Runs train.py in forks of one warm process."""
    with TrainServer() as server:
        yield server
