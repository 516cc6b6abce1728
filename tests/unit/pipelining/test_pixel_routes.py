"""From the rank that decodes an image to the ranks whose tasks read it."""

import pytest

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.common.row_slices import step_shares
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.run.pixels import pixel_routes, reading_stages

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
"""Of each microbatch, of different sizes; so many are drawn, too."""


def metas() -> list[MicrobatchMeta]:
    found = []
    for number, count in enumerate(IMAGES):
        images = tuple(ImageMeta(8, 8, 4 + 3 * i, 1) for i in range(count))
        drawn = tuple(GeneratedMeta((1, 2, 2 + i), 3) for i in range(count))
        sample = SampleMeta("made", number, 16, images, "vision", drawn)
        found.append(MicrobatchMeta((sample,), 16))
    return found


def graph() -> StageGraph:
    """Pairs of images are tasks, which replicas have in turn; drawings are in one task."""
    replica = {("vision", 0, part): part % 2 for part in range(3)} | {("vision", 2, 0): 1}
    return StageGraph(LAYOUT, 3, {"vision": (3, 0, 1), "generator": (1, 0, 1)}, replica)


def test_only_ends_of_the_pipeline_read_pixels():
    assert reading_stages(LAYOUT) == {"vision": [0], "generator": [3, 5]}


@pytest.mark.parametrize(
    ("module", "places", "read"),
    [
        ("vision", [0, 2], {0: [{0, 1, 4}, set(), set()], 2: [{2, 3}, set(), {0, 1}]}),
        ("vision", [0, 0, 2, 2], {0: [{0, 1, 4}, set(), set()], 2: [{2, 3}, set(), {0, 1}]}),
        ("generator", [1, 3], {place: [set(range(n)) for n in IMAGES] for place in (1, 3)}),
    ],
    ids=["replicas", "replicas of two tensor-parallel ranks", "both ends of a generator"],
)
def test_every_image_comes_from_one_rank(module, places, read):
    routes = pixel_routes(graph(), module, places, metas())
    for reader, place in enumerate(places):
        for microbatch, wanted in enumerate(read[place]):
            arriving = [image for source in routes for image in source[reader][microbatch]]
            assert arriving == sorted(wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 40])
def test_shares_of_a_step_are_complete_and_even(ranks):
    shares = step_shares(metas(), "vision", ranks)
    for microbatch, count in enumerate(IMAGES):
        assert [i for own in shares for i in own[microbatch]] == list(range(count))
    patches = [sum(4 + 3 * image for images in own for image in images) for own in shares]
    mean = sum(patches) / ranks
    assert max(patches) <= mean + 4 + 3 * max(IMAGES)
