import random

import numpy as np
import torch

from torchmm.common.rng import capture_rng, restore_rng, seed_everything


def random_values() -> list[float]:
    normal = random.gauss(0, 1)  # the Python generator caches a second value
    return [normal, random.random(), np.random.randn(), torch.rand(()).item()]  # noqa: NPY002


def test_restored_generators_repeat_their_values():
    seed_everything(1)
    random_values()
    state = capture_rng()
    expected = [random_values() for _ in range(3)]
    seed_everything(2)
    restore_rng(state)
    assert [random_values() for _ in range(3)] == expected


def test_rng_state_contains_only_bytes():
    assert {t.dtype for t in capture_rng().values()} == {torch.uint8}


def test_coordinates_have_separate_random_streams():
    def stream(*coordinates: int) -> tuple[float, ...]:
        seed_everything(*coordinates)
        return tuple(random_values())

    streams = {stream(0), stream(0, 0), stream(0, 1), stream(1), stream(0, 0, 1)}
    assert len(streams) == 5
    assert stream(0, 1) in streams


def test_captured_state_does_not_change():
    state = capture_rng()
    copy = {name: value.clone() for name, value in state.items()}
    random_values()
    assert all(torch.equal(state[name], copy[name]) for name in state)
