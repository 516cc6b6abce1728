"""Ranks that send to each other need a hardware queue for each stream."""

import os

import pytest

from torchmm.common.errors import ConfigError
from torchmm.parallel.p2p import (
    HARDWARE_QUEUES,
    check_hardware_queues,
    reserve_hardware_queues,
)

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
PAIR = [(0, 1), (1, 0)]
STAR = [(0, peer) for peer in range(1, 60)]


def test_all_queues_are_asked_for_unless_the_environment_says_how_many(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    reserve_hardware_queues()
    assert os.environ[NAME] == str(HARDWARE_QUEUES)
    monkeypatch.setenv(NAME, "4")
    reserve_hardware_queues()
    assert os.environ[NAME] == "4"


@pytest.mark.parametrize(
    ("given", "channels", "refused"),
    [
        ("1", [], False),
        ("1", PAIR, True),
        ("9", PAIR, True),
        ("10", PAIR, False),
        ("31", STAR, True),
        ("32", STAR, False),
        ("", PAIR, False),
    ],
)
def test_fewer_than_the_busiest_rank_needs_are_refused(given, channels, refused, monkeypatch):
    monkeypatch.setenv(NAME, given)
    if refused:
        with pytest.raises(ConfigError, match=f"{NAME} = {given} in the environment.*unset the"):
            check_hardware_queues(channels)
    else:
        check_hardware_queues(channels)
