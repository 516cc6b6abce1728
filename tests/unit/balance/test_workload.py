"""Microbatches drawn from statistics: sizes in their bounds, and the same for every layout."""

from itertools import chain

import pytest

from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.common.batch import SampleMeta
from torchmm.recipe.simulation_section import SimulationConfig

VLM = SimulationConfig.model_validate(
    {
        "seed": 3,
        "images": {"vision": {"patches": 64, "tokens": 4}},
        "sequences": [
            {"weight": 3.0, "images": [5, 12], "samples": 4},
            {"images": [0, 2]},
        ],
    }
)


def samples_of(config: SimulationConfig, count: int, **settings: int) -> list[SampleMeta]:
    settings = {"sequence_length": 100, **settings}
    return list(chain(*(m.samples for m in sample_microbatches(config, count, **settings))))


def test_sequences_are_of_the_mixture_and_full() -> None:
    microbatches = sample_microbatches(VLM, 2000, sequence_length=100)
    counts = [m.image_count for m in microbatches]
    assert set(counts) == {0, 1, 2, *range(5, 13)}
    many = [n for n in counts if n >= 5]
    assert len(many) / len(counts) == pytest.approx(0.75, abs=0.03)
    assert sum(many) / len(many) == pytest.approx(8.5, abs=0.2)
    for microbatch in microbatches:
        assert microbatch.tokens == microbatch.used_tokens == 100
        assert len(microbatch.samples) == (4 if microbatch.image_count >= 5 else 1)
        assert microbatch.patches("vision") == [64] * microbatch.image_count
        lengths = [s.tokens - 4 * len(s.images) for s in microbatch.samples]
        assert max(lengths) - min(lengths) <= 1
        assert all((s.encoder == "vision") == bool(s.images) for s in microbatch.samples)


def test_a_sequence_is_the_same_in_every_layout() -> None:
    whole = samples_of(VLM, 12)
    assert samples_of(VLM, 3, microbatch_size=4) == whole
    assert samples_of(VLM, 2, microbatch_size=3) + samples_of(VLM, 6, first=6) == whole
    other = VLM.model_copy(update={"seed": 4})
    assert samples_of(other, 12) != whole
    assert len({(s.source, s.index) for s in whole}) == len(whole)


def test_without_statistics_everything_is_text() -> None:
    (sample,) = samples_of(SimulationConfig(), 1)
    assert (sample.tokens, sample.images, sample.generated) == (100, (), ())


def test_clips_share_the_frames_of_a_sequence() -> None:
    drawn = {"rows": 3, "columns": 4, "frames": [2, 32], "frames_per_sequence": 32}
    config = SimulationConfig.model_validate(
        {
            "generated": {**drawn, "context_tokens": 30},
            "sequences": [{"generated": [1, 8], "tokens": [20, 60]}],
        }
    )
    counts, longest = set(), 0
    for sample in samples_of(config, 300):
        assert 20 <= sample.tokens <= 60
        frames = [clip.grid_thw[0] for clip in sample.generated]
        assert min(frames) >= 2 and sum(frames) <= 32
        assert {clip.grid_thw[1:] for clip in sample.generated} == {(3, 4)}
        assert {clip.context for clip in sample.generated} == {min(30, sample.tokens)}
        counts.add(len(frames))
        longest = max(longest, *frames)
    assert counts == set(range(1, 9)) and longest > 24


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"sequences": [{"images": [1, 26]}]}, "sequences[0].images", "up to 104 tokens"),
        ({"sequences": [{"images": [3, 1]}]}, "sequences[0].images", "least and most"),
        ({"sequences": [{"images": [3]}]}, "sequences[0].images", "two numbers"),
        (
            {"generated": {"rows": 1, "columns": 1, "frames": [0, 4]}},
            "simulation.generated.frames = [0, 4]",
            "from 1 on",
        ),
        ({"sequences": [{"encoder": "ear", "images": [1, 1]}]}, "images", "images.ear]"),
        ({"images": {}, "sequences": [{"images": [1, 1]}]}, "images", "[simulation.images.NAME]"),
        ({"sequences": [{"generated": [0, 1]}]}, "generated", "[simulation.generated]"),
        ({"sequences": [{"tokens": [9, 101]}]}, "tokens", "sequence_length = 100"),
        ({"sequences": [{"tokens": [2, 9], "samples": 3}]}, "tokens", "samples = 3"),
        (
            {
                "generated": {"rows": 1, "columns": 1, "frames": [4, 8], "frames_per_sequence": 9},
                "sequences": [{"generated": [1, 3]}],
            },
            "generated",
            "at least 12 frames",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict, key: str, text: str) -> None:
    config = SimulationConfig.model_validate({**VLM.model_dump(), **changes})
    with pytest.raises(ValueError) as caught:
        sample_microbatches(config, 1, sequence_length=100)
    assert key in str(caught.value) and text in str(caught.value)


def test_every_contradiction_is_told() -> None:
    config = SimulationConfig.model_validate(
        {"sequences": [{"images": [2, 1]}, {"generated": [1, 1]}]}
    )
    with pytest.raises(ValueError, match=r"sequences\[0\]\.images.*sequences\[1\]\.generated"):
        sample_microbatches(config, 1, sequence_length=100)
