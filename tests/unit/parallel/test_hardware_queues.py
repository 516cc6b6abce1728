"""Tests of hardware queues: ranks that communicate require one queue per stream."""

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


def test_environment_overrides_number_of_hardware_queues(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    reserve_hardware_queues()
    assert os.environ[NAME] == str(HARDWARE_QUEUES)
    monkeypatch.setenv(NAME, "4")
    reserve_hardware_queues()
    assert os.environ[NAME] == "4"


@pytest.mark.parametrize(
    ("value", "channels", "is_rejected"),
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
def test_too_few_hardware_queues_are_rejected(value, channels, is_rejected, monkeypatch):
    monkeypatch.setenv(NAME, value)
    if is_rejected:
        with pytest.raises(ConfigError, match=f"{NAME} = {value} in the environment.*unset the"):
            check_hardware_queues(channels)
    else:
        check_hardware_queues(channels)
