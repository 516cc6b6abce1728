"""Steps that a background process plans: the same steps, even if the process is lost."""

import json
import logging
import os
import signal
from functools import partial
from itertools import islice

import numpy as np
import pytest
from data_cases import data_config, training
from index_cases import index_of

from torchmm.common import step_process
from torchmm.common.batch import Imbalance, SequenceAssignment
from torchmm.common.errors import CheckpointError, DataError
from torchmm.data.steps import background_steps
from torchmm.data.steps.background_steps import BackgroundSteps
from torchmm.data.steps.feeds import FeedOptions, IndexFeed
from torchmm.data.steps.plan_steps import StepPosition
from torchmm.data.steps.sample_order import OrderedSource, SampleOrder
from torchmm.recipe.data_section import SourceConfig

RANK = 1
SIZES = np.random.default_rng(5).integers(1, 65, 211)


def order_of():
    """Return the order of two sources of fabricated sizes."""
    sources = []
    for number, name in enumerate(("a", "b")):
        options = FeedOptions(number, name, 3, shuffle=True, one_epoch=False)
        make_feed = partial(IndexFeed, options, index_of(SIZES, None), ())
        sources.append(OrderedSource(name, SourceConfig(path=name), make_feed))
    return SampleOrder(sources, {}, ())


def saved(step):
    return json.loads(json.dumps(step.state))


class ReverseOrder:
    """Picklable function that arranges packs from the last to the first."""

    def __call__(self, packs):
        last = len(packs) - 1
        half = range(len(packs) // 2)
        places = [[[last - 2 * i - rank] for i in half] for rank in range(2)]
        return SequenceAssignment(places, Imbalance(1.5, 1.25))


class Begin:
    """Picklable sequence of steps of fabricated sizes."""

    def __init__(self, tmp_path):
        self.data = data_config(tmp_path, reorder="both", packing_buffer_size=5)
        self.run = training(global_batch_size=8, steps=99)

    def __call__(self, position):
        return order_of().sequence(self.data, self.run, position)


class FiniteSteps(Begin):
    """Five steps, followed by an error or the end."""

    def __init__(self, tmp_path, error=None):
        super().__init__(tmp_path)
        self.error = error

    def __call__(self, position):
        steps = super().__call__(position)
        done = 0 if position.state is None else position.state["steps"]
        return Limited(steps, 5 - done, self.error)


class Limited:
    notice = ""

    def __init__(self, steps, remaining, error):
        self.steps, self.remaining, self.error = steps, remaining, error

    def __next__(self):
        self.remaining -= 1
        if self.remaining < 0 and self.error is not None:
            raise self.error
        if self.remaining < 0:
            raise StopIteration
        return next(self.steps)


POSITION = StepPosition(RANK, 2, None, ReverseOrder())


def rank_samples(step):
    return [[[(i.meta.source, i.meta.index) for i in p] for p in m] for m in step.ranks[RANK]]


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(step_process, "MIN_BACKGROUND_MS", 0.0)
    monkeypatch.setattr(background_steps, "TIMEOUT_S", 300.0)


def test_background_steps_match_foreground_steps(tmp_path, always, caplog):
    caplog.set_level(logging.INFO)
    begin = Begin(tmp_path)
    foreground, background = begin(POSITION), BackgroundSteps(begin, POSITION)
    for _ in range(12):
        one, two = next(foreground), next(background)
        assert rank_samples(one) == rank_samples(two) and saved(one) == saved(two)
        assert (one.skipped, one.epoch) == (two.skipped, two.epoch)
        assert one.metas(64)[RANK] == two.metas(64)[RANK]
    assert background._process.is_running and "reordering a step takes" in caplog.text
    background.close()


def test_fast_planning_uses_no_process(tmp_path):
    steps = BackgroundSteps(Begin(tmp_path), POSITION)
    list(islice(steps, 5))
    assert not steps._process.is_running


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_process_leaves_no_gap(tmp_path, always, caplog, monkeypatch, number):
    begin = Begin(tmp_path)
    foreground, background = begin(POSITION), BackgroundSteps(begin, POSITION)
    for _ in range(4):
        assert rank_samples(next(foreground)) == rank_samples(next(background))
    process = background._process._process
    os.kill(process.pid, number)
    monkeypatch.setattr(background_steps, "TIMEOUT_S", 1.0)
    for _ in range(6):
        one, two = next(foreground), next(background)
        assert rank_samples(one) == rank_samples(two) and saved(one) == saved(two)
    assert background._process.is_lost and not process._process.is_alive()
    assert f"the reordering process ({process.pid}" in caplog.text
    assert (", stopped)" in caplog.text) == (number == signal.SIGSTOP)
    assert "from now on steps are reordered in the training process" in caplog.text


def test_end_and_errors_reach_caller(tmp_path, always):
    steps = BackgroundSteps(FiniteSteps(tmp_path), POSITION)
    assert len(list(steps)) == 5 and next(steps, None) is None
    steps = BackgroundSteps(
        FiniteSteps(tmp_path, DataError("more than 3 samples are corrupt")), POSITION
    )
    with pytest.raises(DataError, match="more than 3"):
        list(steps)
    steps.close()


def test_background_step_has_names_of_its_rank(tmp_path, always):
    """Check that samples of the remaining ranks stay in the background process."""
    steps = BackgroundSteps(Begin(tmp_path), POSITION)
    for _ in range(3):
        step = next(steps)
    with pytest.raises(KeyError):
        list(step.ranks[1 - RANK])
    steps.close()


def test_state_inside_removed_window_is_rejected(tmp_path):
    """Check a state of an older version, which saved the position before a window as version 3."""
    before = saved(next(Begin(tmp_path)(POSITION)))
    state = {"version": 3, "window": {"before": before, "done": 1, "steps": [[0], [1]]}}
    with pytest.raises(CheckpointError, match="loader state of the checkpoint has version 3"):
        Begin(tmp_path)(POSITION._replace(state=state))
