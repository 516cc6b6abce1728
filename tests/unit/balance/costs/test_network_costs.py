"""Tests of collective times over several nodes, against arithmetic and published bandwidths."""

from dataclasses import replace

import pytest

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.costs.devices import BETWEEN_NODES, Device, LinkRanks
from torchmm.costs.operators import (
    KINDS,
    DeviceProfile,
    EfficiencyCurve,
    Operator,
    OperatorKind,
    all_reduce_bytes,
    operator_time_ms,
)

ALL = EfficiencyCurve((1.0,), (1.0,))
DEVICE = Device("toy", {"float32": 1e12}, 1e11, 1e9, 400e9, 50e9, 8, False, "8 cards of 50 GB/s")
PROFILE = DeviceProfile(DEVICE, dict.fromkeys(KINDS, ALL))
TOTAL_BYTES = 16e9
"""Bytes of all ranks."""


def time_ms(
    kind: OperatorKind, sent: float, link: LinkRanks, profile: DeviceProfile = PROFILE
) -> float:
    return float(
        operator_time_ms(Operator(kind, network_bytes=sent, link=link), profile, "float32")
    )


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_multinode_ring_uses_all_network_cards(kind: OperatorKind) -> None:
    sent = TOTAL_BYTES * 15 / 16
    # 15 GB are sent between the nodes over eight network cards, as fast as over NVLink.
    assert time_ms(kind, sent, LinkRanks(2, 8)) == pytest.approx(sent / 400e9 * 1e3)
    halved = replace(PROFILE, device=replace(DEVICE, network_bytes_per_s=25e9))
    assert time_ms(kind, sent, LinkRanks(2, 8), halved) == pytest.approx(sent / 200e9 * 1e3)
    # One rank per node uses one network card.
    assert time_ms(kind, TOTAL_BYTES / 2, BETWEEN_NODES) == pytest.approx(
        TOTAL_BYTES / 2 / 50e9 * 1e3
    )


def test_multinode_all_reduce_is_hierarchical() -> None:
    sent = all_reduce_bytes(TOTAL_BYTES, 16)
    inside_s = 2 * TOTAL_BYTES * 7 / 8 / 400e9  # reduce-scatter and all-gather of eight ranks
    between_s = 2 * TOTAL_BYTES / 8 / 2 / 50e9  # each pair of ranks all-reduces an eighth
    assert inside_s > between_s
    assert time_ms("all_reduce", sent, LinkRanks(2, 8)) == pytest.approx(1e3 * inside_s)
    slow = replace(PROFILE, device=replace(DEVICE, network_bytes_per_s=5e9))
    assert time_ms("all_reduce", sent, LinkRanks(2, 8), slow) == pytest.approx(1e4 * between_s)


def test_all_to_all_uses_local_network_cards() -> None:
    sent = TOTAL_BYTES * 15 / 16  # 7 GB to ranks of the node, 8 GB to ranks of the second node
    assert time_ms("p2p", sent, LinkRanks(2, 8)) == pytest.approx(8e9 / 50e9 * 1e3)


def test_ranks_share_scarce_network_cards() -> None:
    model = CostModel(load_profile("a800_disttrain"))
    assert model.profile.device.network_bytes_per_s == 12.5e9  # four cards of 25 GB/s for 8 ranks
    times_ms = model.transfer_times_ms([12.5e9], [BETWEEN_NODES])
    assert times_ms == pytest.approx([1e3 * 50 / 47], rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "stride", "link"),
    [
        (8, 1, LinkRanks(1, 8)),
        (16, 1, LinkRanks(2, 8)),
        (2, 8, LinkRanks(2, 1)),  # one of eight groups: one rank per node
        (16, 4, LinkRanks(8, 2)),
        (4, 2, LinkRanks(1, 4)),
    ],
)
def test_group_link_depends_on_stride(ranks: int, stride: int, link: LinkRanks) -> None:
    assert CostModel(PROFILE, "float32").group_link(ranks, stride) == link


def test_collectives_reach_published_bandwidth() -> None:
    profile = load_profile("h100")

    def bus_gb_s(kind: OperatorKind, ranks: int, link: LinkRanks) -> float:
        sent = 8e9 * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        return sent / time_ms(kind, sent, link, profile) / 1e6

    # github.com/NVIDIA/nccl-tests/issues/212: 370 and 480 GB/s in a node of H100.
    assert bus_gb_s("all_gather", 8, LinkRanks(1, 8)) == pytest.approx(370, rel=0.01)
    assert bus_gb_s("all_reduce", 8, LinkRanks(1, 8)) == pytest.approx(480, rel=0.01)
    # Two nodes: 470 GB/s for all-reduces, and eight cards of 46 to 48 GB/s for rings.
    assert bus_gb_s("all_reduce", 16, LinkRanks(2, 8)) == pytest.approx(470, rel=0.1)
    assert bus_gb_s("all_gather", 16, LinkRanks(2, 8)) == pytest.approx(370, rel=0.03)
