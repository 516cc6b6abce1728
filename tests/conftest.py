"""What tests all over the tree share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from train_server import TrainServer

ROOT = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Lets pytest-xdist start files in the order below, not those with most tests first."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: at the end, short ones keep all workers busy."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


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
