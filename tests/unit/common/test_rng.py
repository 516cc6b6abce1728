import random

import numpy as np
import torch

from torchmm.common.rng import capture_rng, restore_rng, seed_everything


def draw() -> list[float]:
    normal = random.gauss(0, 1)  # leaves a second value cached in Python's generator
    return [normal, random.random(), np.random.randn(), torch.rand(()).item()]  # noqa: NPY002


def test_restored_generators_repeat_their_draws():
    seed_everything(1)
    draw()
    state = capture_rng()
    expected = [draw() for _ in range(3)]
    seed_everything(2)
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_state_is_made_of_bytes_only():
    assert {t.dtype for t in capture_rng().values()} == {torch.uint8}


def test_coordinates_give_streams_of_their_own():
    def stream(*coordinates: int) -> tuple[float, ...]:
        seed_everything(*coordinates)
        return tuple(draw())

    streams = {stream(0), stream(0, 0), stream(0, 1), stream(1), stream(0, 0, 1)}
    assert len(streams) == 5
    assert stream(0, 1) in streams


def test_later_draws_do_not_reach_a_captured_state():
    state = capture_rng()
    copy = {name: value.clone() for name, value in state.items()}
    draw()
    assert all(torch.equal(state[name], copy[name]) for name in state)
