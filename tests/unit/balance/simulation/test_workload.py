"""Tests of simulated microbatches: distributions, limits, and independence of parallelism."""

from collections import Counter
from hashlib import sha256
from itertools import chain

import pytest

from torchmm.balance.simulation.section import SimulationConfig
from torchmm.balance.simulation.workload import sample_microbatches
from torchmm.common.batch import SampleMeta

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


def test_sequences_follow_mixture_and_are_full() -> None:
    microbatches = sample_microbatches(VLM, 2000, sequence_length=100)
    counts = [m.image_count for m in microbatches]
    assert set(counts) == {0, 1, 2, *range(5, 13)}
    image_sequences = [n for n in counts if n >= 5]
    assert len(image_sequences) / len(counts) == pytest.approx(0.75, abs=0.03)
    assert sum(image_sequences) / len(image_sequences) == pytest.approx(8.5, abs=0.2)
    for microbatch in microbatches:
        assert microbatch.tokens == microbatch.used_tokens == 100
        assert len(microbatch.samples) == (4 if microbatch.image_count >= 5 else 1)
        assert microbatch.patches("vision") == [64] * microbatch.image_count
        lengths = [s.tokens - 4 * len(s.images) for s in microbatch.samples]
        assert max(lengths) - min(lengths) <= 1
        assert all((s.encoder == "vision") == bool(s.images) for s in microbatch.samples)


def test_sequences_are_independent_of_batch_shape() -> None:
    samples = samples_of(VLM, 12)
    assert samples_of(VLM, 3, microbatch_size=4) == samples
    assert samples_of(VLM, 2, microbatch_size=3) + samples_of(VLM, 6, first=6) == samples
    other = VLM.model_copy(update={"seed": 4})
    assert samples_of(other, 12) != samples
    assert len({(s.source, s.index) for s in samples}) == len(samples)


def test_default_samples_are_text() -> None:
    (sample,) = samples_of(SimulationConfig(), 1)
    assert (sample.tokens, sample.images, sample.generated) == (100, (), ())


def test_videos_share_frames_of_a_sequence() -> None:
    generated = {"rows": 3, "columns": 4, "frames": [2, 32], "frames_per_sequence": 32}
    config = SimulationConfig.model_validate(
        {
            "generated": {**generated, "context_tokens": 30},
            "sequences": [{"generated": [1, 8], "tokens": [20, 60]}],
        }
    )
    counts, longest = set(), 0
    for sample in samples_of(config, 300):
        assert 20 <= sample.tokens <= 60
        frames = [video.grid_thw[0] for video in sample.generated]
        assert min(frames) >= 2 and sum(frames) <= 32
        assert {video.grid_thw[1:] for video in sample.generated} == {(3, 4)}
        assert {video.context for video in sample.generated} == {min(30, sample.tokens)}
        counts.add(len(frames))
        longest = max(longest, *frames)
    assert counts == set(range(1, 9)) and longest > 24


FIXED = {
    "seed": 3,
    "images": {"vision": {"patches": 64, "tokens": 4}},
    "generated": {
        "rows": 3,
        "columns": 4,
        "frames": [2, 8],
        "frames_per_sequence": 20,
        "context_tokens": 30,
    },
    "sequences": [
        {"weight": 3.0, "images": [5, 12], "samples": 4, "generated": [0, 3]},
        {"images": [0, 2]},
        {"tokens": [20, 60], "generated": [1, 8]},
    ],
}


def test_samples_match_recorded_results() -> None:
    microbatches = sample_microbatches(
        SimulationConfig.model_validate(FIXED), 500, sequence_length=100
    )
    # Remove fields that were added after the results were recorded.
    text = repr(microbatches)
    for field in ("balanced=False", "received_tokens=()", "rows=0", "chosen_tokens=0"):
        text = text.replace(f", {field}", "")
    assert sha256(text.encode()).hexdigest()[:16] == "ec7ed7e6c9716efa"


MIXED = [
    {"weight": 3, "rows": [2, 6], "columns": [4, 8]},
    {"patches": [40, 100]},
    {"weight": 4, "patches": 400, "tokens": 7},
]


def sized(sizes: list[dict], **settings: object) -> SimulationConfig:
    images = {"vision": {"patches_per_token": 4, "sizes": sizes}}
    sequences = [{"images": [0, 6], "samples": 2}]
    return SimulationConfig.model_validate({"images": images, "sequences": sequences, **settings})


def test_image_sizes_follow_mixture() -> None:
    images = [i for s in samples_of(sized(MIXED), 3000, sequence_length=200) for i in s.images]
    large = [i for i in images if i.patches == 400]
    assert {i.tokens for i in large} == {7}
    assert len(large) / len(images) == pytest.approx(4 / 8, abs=0.02)
    small = [i for i in images if i.patches != 400]
    assert all(i.tokens == i.patches // 4 for i in small)
    products = {rows * columns for rows in (2, 4, 6) for columns in (4, 6, 8)}
    both = Counter(i.patches for i in small)
    assert set(both) == products | set(range(40, 101))
    # Three of four have rows and columns. Two of nine combinations, 6 x 4 and 4 x 6, have 24
    # patches.
    assert both[24] / len(small) == pytest.approx(3 / 4 * 2 / 9, abs=0.02)
    assert both[41] / len(small) == pytest.approx(1 / 4 / 61, abs=0.004)


def test_image_sizes_do_not_change_other_values() -> None:
    uniform = sized([{"patches": 16, "tokens": 4}])
    for one, other in zip(
        sample_microbatches(uniform, 200, sequence_length=200),
        sample_microbatches(sized(MIXED), 200, sequence_length=200),
        strict=True,
    ):
        assert one.image_count == other.image_count
        assert one.used_tokens == other.used_tokens == 200
        assert [len(s.images) for s in one.samples] == [len(s.images) for s in other.samples]


def test_image_sizes_are_independent_of_batch_shape() -> None:
    config = sized(MIXED, generated={"rows": [1, 5], "columns": 2})
    samples = samples_of(config, 12, sequence_length=200)
    assert samples_of(config, 3, microbatch_size=4, sequence_length=200) == samples
    assert (
        samples_of(config, 6, sequence_length=200)
        + samples_of(config, 6, first=6, sequence_length=200)
        == samples
    )
    other = config.model_copy(update={"seed": 4})
    assert samples_of(other, 12, sequence_length=200) != samples


def test_generated_image_sizes_follow_mixture() -> None:
    sizes = [{"rows": [1, 3], "columns": 2}, {"weight": 3.0, "rows": 8, "columns": [8, 9]}]
    config = SimulationConfig.model_validate(
        {"generated": {"sizes": sizes, "frames": [1, 2]}, "sequences": [{"generated": [0, 4]}]}
    )
    grids = [g.grid_thw for s in samples_of(config, 1500) for g in s.generated]
    assert {g[1:] for g in grids} == {(1, 2), (2, 2), (3, 2), (8, 8), (8, 9)}
    assert sum(g[1] == 8 for g in grids) / len(grids) == pytest.approx(3 / 4, abs=0.03)
    single_size = {"generated": {"rows": 5, "columns": 5, "frames": [1, 2]}}
    uniform = SimulationConfig.model_validate({**config.model_dump(), **single_size})
    frames = [g.grid_thw[0] for s in samples_of(uniform, 1500) for g in s.generated]
    assert frames == [g[0] for g in grids]


@pytest.mark.parametrize(
    ("images", "key", "text"),
    [
        ({"tokens": 3}, "images.vision", "add rows and columns, or patches"),
        ({"rows": 4}, "images.vision", "add columns"),
        (
            {"rows": 4, "columns": 4, "patches": 16},
            "vision.rows",
            "cannot be combined with patches",
        ),
        ({"patches": [9, 4]}, "vision.patches = [9, 4]", "[minimum, maximum]"),
        ({"patches": 0}, "vision.patches = [0, 0]", "a minimum of at least 1"),
        ({"patches": [4, 8], "tokens": 2}, "vision.tokens", "set patches_per_token"),
        (
            {"rows": [3, 6], "columns": 4, "patches_per_token": 4},
            "vision.rows = [3, 6]",
            "multiples of 2",
        ),
        (
            {"rows": 6, "columns": 4, "patches_per_token": 6},
            "patches_per_token = 6",
            "not a square number",
        ),
        ({"patches": 4, "sizes": [{"patches": 9}]}, "vision.sizes", "remove one of them"),
        ({"sizes": [{"patches": 4}, {"rows": 9}]}, "vision.sizes[1]", "add columns"),
        ({"sizes": [{"patches": 4}, {"patches": [5, 60]}]}, "[0].images", "up to 120 tokens"),
    ],
)
def test_invalid_image_sizes_are_rejected(images: dict, key: str, text: str) -> None:
    config = {"images": {"vision": images}, "sequences": [{"images": [1, 2]}]}
    with pytest.raises(ValueError) as caught:
        sample_microbatches(SimulationConfig.model_validate(config), 1, sequence_length=100)
    assert key in str(caught.value) and text in str(caught.value)


@pytest.mark.parametrize(
    ("generated", "key", "text"),
    [
        ({"rows": 4}, "simulation.generated", "add columns"),
        ({}, "simulation.generated", "add rows and columns"),
        ({"rows": 4, "columns": [0, 2]}, "generated.columns = [0, 2]", "a minimum of at least 1"),
        ({"rows": 4, "columns": 4, "sizes": [{"rows": 1, "columns": 1}]}, "sizes", "remove one"),
        ({"sizes": [{"rows": [2, 1], "columns": 1}]}, "sizes[0].rows", "[minimum, maximum]"),
    ],
)
def test_invalid_generated_sizes_are_rejected(generated: dict, key: str, text: str) -> None:
    config = SimulationConfig.model_validate({"generated": generated})
    with pytest.raises(ValueError) as caught:
        sample_microbatches(config, 1, sequence_length=100)
    assert key in str(caught.value) and text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"sequences": [{"images": [1, 26]}]}, "sequences[0].images", "up to 104 tokens"),
        ({"sequences": [{"images": [3, 1]}]}, "sequences[0].images", "[minimum, maximum]"),
        ({"sequences": [{"images": [3]}]}, "sequences[0].images", "[minimum, maximum]"),
        (
            {"generated": {"rows": 1, "columns": 1, "frames": [0, 4]}},
            "simulation.generated.frames = [0, 4]",
            "a minimum of at least 1",
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
def test_contradictory_settings_are_rejected(changes: dict, key: str, text: str) -> None:
    config = SimulationConfig.model_validate({**VLM.model_dump(), **changes})
    with pytest.raises(ValueError) as caught:
        sample_microbatches(config, 1, sequence_length=100)
    assert key in str(caught.value) and text in str(caught.value)


def test_all_contradictions_are_reported() -> None:
    config = SimulationConfig.model_validate(
        {"sequences": [{"images": [2, 1]}, {"generated": [1, 1]}]}
    )
    with pytest.raises(ValueError, match=r"sequences\[0\]\.images.*sequences\[1\]\.generated"):
        sample_microbatches(config, 1, sequence_length=100)
