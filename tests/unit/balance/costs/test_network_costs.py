"""Times of collectives over several nodes, against arithmetic and published bandwidths."""

from dataclasses import replace

import pytest

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.costs.devices import NETWORK, Device, Link
from torchmm.costs.operators import (
    KINDS,
    Curve,
    Kind,
    Operator,
    Profile,
    all_reduce_bytes,
    operator_ms,
)

ALL = Curve((1.0,), (1.0,))
DEVICE = Device("toy", {"float32": 1e12}, 1e11, 1e9, 400e9, 50e9, 8, False, "8 cards of 50 GB/s")
PROFILE = Profile(DEVICE, dict.fromkeys(KINDS, ALL))
WHOLE = 16e9
"""Bytes of all ranks."""


def time_ms(kind: Kind, sent: float, link: Link, profile: Profile = PROFILE) -> float:
    return float(operator_ms(Operator(kind, network_bytes=sent, link=link), profile, "float32"))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_ring_over_nodes_uses_all_cards(kind: Kind) -> None:
    sent = WHOLE * 15 / 16
    # 15 GB pass between the nodes over eight cards, and over NVLink as fast.
    assert time_ms(kind, sent, Link(2, 8)) == pytest.approx(sent / 400e9 * 1e3)
    halved = replace(PROFILE, device=replace(DEVICE, network_bytes_per_s=25e9))
    assert time_ms(kind, sent, Link(2, 8), halved) == pytest.approx(sent / 200e9 * 1e3)
    # One rank per node owns one card.
    assert time_ms(kind, WHOLE / 2, NETWORK) == pytest.approx(WHOLE / 2 / 50e9 * 1e3)


def test_all_reduce_over_nodes_is_hierarchical() -> None:
    sent = all_reduce_bytes(WHOLE, 16)
    inside_s = 2 * WHOLE * 7 / 8 / 400e9  # reduce-scatter and all-gather of eight ranks
    between_s = 2 * WHOLE / 8 / 2 / 50e9  # each pair of ranks all-reduces an eighth
    assert inside_s > between_s
    assert time_ms("all_reduce", sent, Link(2, 8)) == pytest.approx(1e3 * inside_s)
    slow = replace(PROFILE, device=replace(DEVICE, network_bytes_per_s=5e9))
    assert time_ms("all_reduce", sent, Link(2, 8), slow) == pytest.approx(1e4 * between_s)


def test_all_to_all_sends_from_own_cards() -> None:
    sent = WHOLE * 15 / 16  # 7 GB to ranks of the node, 8 GB to those of the other one
    assert time_ms("p2p", sent, Link(2, 8)) == pytest.approx(8e9 / 50e9 * 1e3)


def test_ranks_share_cards_if_cards_are_few() -> None:
    model = CostModel(load_profile("a800_disttrain"))
    assert model.profile.device.network_bytes_per_s == 12.5e9  # four cards of 25 GB/s for 8 ranks
    times_ms = model.transfers_ms([12.5e9], [NETWORK])
    assert times_ms == pytest.approx([1e3 * 50 / 47], rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "stride", "link"),
    [
        (8, 1, Link(1, 8)),
        (16, 1, Link(2, 8)),
        (2, 8, Link(2, 1)),  # one of eight groups: a rank per node
        (16, 4, Link(8, 2)),
        (4, 2, Link(1, 4)),
    ],
)
def test_group_is_placed_by_stride(ranks: int, stride: int, link: Link) -> None:
    assert CostModel(PROFILE, "float32").group_link(ranks, stride) == link


def test_published_bandwidth_is_reached() -> None:
    profile = load_profile("h100")

    def bus_gb_s(kind: Kind, ranks: int, link: Link) -> float:
        sent = 8e9 * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        return sent / time_ms(kind, sent, link, profile) / 1e6

    # github.com/NVIDIA/nccl-tests/issues/212: 370 and 480 GB/s in a node of H100.
    assert bus_gb_s("all_gather", 8, Link(1, 8)) == pytest.approx(370, rel=0.01)
    assert bus_gb_s("all_reduce", 8, Link(1, 8)) == pytest.approx(480, rel=0.01)
    # Two nodes: 470 GB/s for all-reduces, and eight cards of 46 to 48 GB/s for rings.
    assert bus_gb_s("all_reduce", 16, Link(2, 8)) == pytest.approx(470, rel=0.1)
    assert bus_gb_s("all_gather", 16, Link(2, 8)) == pytest.approx(370, rel=0.03)
