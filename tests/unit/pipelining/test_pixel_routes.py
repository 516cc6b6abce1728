"""Tests of pixel routes from the rank that decodes an image to the ranks that read it."""

import pytest

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.common.sequence_slices import assign_step_images
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.run.pixel_exchange import pixel_routes, reading_stages

LAYOUT = StageLayout(
    (
        StageSpec(0, "vision", 0, 1, (0, 2)),
        StageSpec(1, "vision", 1, 2, (1, 3)),
        StageSpec(2, "llm", 0, 2, (0,)),
        StageSpec(3, "generator", 0, 1, (1,)),
        StageSpec(4, "generator", 1, 2, (2,)),
        StageSpec(5, "generator", 2, 3, (3,)),
    ),
    ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)),
    frozenset({"vision", "generator"}),
)
IMAGES = (5, 0, 2)
"""Number of input images of different sizes per microbatch, and number of generated images."""


def metas() -> list[MicrobatchMeta]:
    metas_ = []
    for number, count in enumerate(IMAGES):
        images = tuple(ImageMeta(8, 8, 4 + 3 * i, 1) for i in range(count))
        generated = tuple(GeneratedMeta((1, 2, 2 + i), 3) for i in range(count))
        sample = SampleMeta("synthetic", number, 16, images, "vision", generated)
        metas_.append(MicrobatchMeta((sample,), 16))
    return metas_


def graph() -> StageGraph:
    """Return a graph with up to two images per task, and with generation tasks."""
    replica = {("vision", 0, part): part % 2 for part in range(3)} | {("vision", 2, 0): 1}
    return StageGraph(LAYOUT, 3, {"vision": (3, 0, 1), "generator": (1, 0, 1)}, replica)


def test_only_end_stages_read_pixels():
    assert reading_stages(LAYOUT) == {"vision": [0], "generator": [3, 5]}


@pytest.mark.parametrize(
    ("module", "positions", "read"),
    [
        ("vision", [0, 2], {0: [{0, 1, 4}, set(), set()], 2: [{2, 3}, set(), {0, 1}]}),
        ("vision", [0, 0, 2, 2], {0: [{0, 1, 4}, set(), set()], 2: [{2, 3}, set(), {0, 1}]}),
        ("generator", [1, 3], {place: [set(range(n)) for n in IMAGES] for place in (1, 3)}),
    ],
    ids=["replicas", "replicas of two tensor-parallel ranks", "both ends of a generator"],
)
def test_every_image_comes_from_one_rank(module, positions, read):
    routes = pixel_routes(graph(), module, positions, metas())
    for reader, position in enumerate(positions):
        for microbatch, expected in enumerate(read[position]):
            arriving = [image for source in routes for image in source[reader][microbatch]]
            assert arriving == sorted(expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 40])
def test_decoding_shares_are_complete_and_even(ranks):
    shares = assign_step_images(metas(), "vision", ranks)
    for microbatch, count in enumerate(IMAGES):
        assert [i for share in shares for i in share[microbatch]] == list(range(count))
    patches = [sum(4 + 3 * image for images in share for image in images) for share in shares]
    mean = sum(patches) / ranks
    assert max(patches) <= mean + 4 + 3 * max(IMAGES)
