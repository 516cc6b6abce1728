"""P2P channels of pipeline ranks: order, empty tensors, checks and lost peers."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed
from toy_stages import toy_specs, toy_stages

from torchmm.common.errors import PeerError
from torchmm.parallel.mesh import start_process_group
from torchmm.parallel.p2p import P2PChannels
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import TensorSpec
from torchmm.pipelining.run.runtime import PipelineRuntime
from torchmm.recipe.parallel_section import ParallelConfig

CPU = torch.device("cpu")
TIMEOUT_S = 3.0
SIZES = [(5, 3), (0, 3), (1,), (), (1000, 700)]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """Return the results of both ranks. The second rank exits at the end without notice."""
    return run_distributed(_run_pair, 2)


def _run_pair() -> dict[str, Any]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    rank = dist.get_rank()
    results: dict[str, Any] = {"arrived": _exchange(P2PChannels(CPU, [1, 0], 20.0), rank)}
    if rank == 0:
        results["rejected"] = _rejected_sends(P2PChannels(CPU, [0, 1], 20.0))
    else:
        P2PChannels(CPU, [0, 1], 20.0)
    for trouble in ("sleeps", "sleeps before receiving", "ends"):
        dist.barrier()  # creating a group has the timeout of the group
        channels = P2PChannels(CPU, [0, 1], TIMEOUT_S)
        channels.warm_up([(0, 1), (1, 0)])
        if rank == 0:
            results[trouble] = _failed_step(channels, trouble)
        elif trouble != "ends":
            time.sleep(2 * TIMEOUT_S)
    return results


def _exchange(channels: P2PChannels, rank: int) -> list[bool]:
    """Send several messages before either rank waits.

    The order of the plan ranks differs from the global ranks.
    """
    channels.warm_up([(0, 1), (1, 0)])
    peer = 1 - channels.plan_rank
    assert channels.plan_rank == 1 - rank

    def tensors(sender: int) -> list[torch.Tensor]:
        values = [torch.full(size, 10.0 * sender + i) for i, size in enumerate(SIZES)]
        values[0] = torch.randn(3, 5, generator=torch.Generator().manual_seed(sender)).T
        return [*values, torch.tensor([2**40, sender]), torch.ones(3, dtype=torch.bfloat16)]

    specs = [TensorSpec(tuple(t.shape), t.dtype) for t in tensors(0)]
    sends = [channels.send(tensors(rank), specs, peer, "send") for _ in range(3)]
    sends.append(channels.send((torch.ones(2),), (torch.ones(2),), peer, "last"))
    receives = [channels.receive(specs, peer, "receive") for _ in range(3)]
    receives.append(channels.receive([torch.ones(2)], peer, "last"))
    arrived = [
        torch.equal(actual, expected)
        for receive in receives[:3]
        for actual, expected in zip(receive.wait("wait"), tensors(1 - rank), strict=True)
    ]
    arrived.append(torch.equal(receives[3].wait("wait")[0], torch.ones(2)))
    for send in sends:
        send.wait("wait")
    return arrived


def _rejected_sends(channels: P2PChannels) -> list[str]:
    specs = [TensorSpec((2, 3), torch.float32)]
    texts = []
    for tensors in ([torch.ones(2, 4)], [torch.ones(2, 3).bfloat16()], [], [torch.ones(2, 3)] * 2):
        with pytest.raises(ValueError) as error:
            channels.send(tensors, specs, 1, "0SEND_F2>1@1")
        texts.append(str(error.value))
    with pytest.raises(ValueError, match=r"rank 0 is not one of the ranks of the plan, \[1, 2\]"):
        P2PChannels(CPU, [1, 2], 1.0)
    return texts


def _failed_step(channels: P2PChannels, trouble: str) -> str:
    """Return the error of a step whose peer does nothing."""
    frozen = trouble == "sleeps before receiving"  # so no gradient is received
    stages = (StageSpec(i, "llm", i, i + 1, (i,), trainable=not frozen) for i in (0, 1))
    layout = StageLayout(tuple(stages), ((0, 1),))
    kinds = (ActionType.F,) if frozen else (ActionType.F, ActionType.B)
    order = tuple(tuple(Action(kind, stage, 0) for kind in kinds) for stage in (0, 1))
    graph = StageGraph(layout, 1)
    plan = lower_plan(order, graph, toy_specs(graph))
    with pytest.raises(PeerError) as error:
        PipelineRuntime(0, toy_stages(graph, 0), channels).step(plan, [1])
    return str(error.value)


@pytest.mark.slow
def test_messages_of_all_sizes_arrive_in_order(outcomes):
    for results in outcomes:
        assert len(results["arrived"]) == 3 * (len(SIZES) + 2) + 1
        assert all(results["arrived"])


@pytest.mark.slow
def test_tensors_that_differ_from_plan_are_rejected(outcomes):
    shape, dtype, missing, more = outcomes[0]["rejected"]
    for text in (shape, dtype, missing, more):
        assert "action 0SEND_F2>1@1 would send" in text
        assert "the plan requires ['(2, 3) torch.float32']" in text
    assert "['(2, 4) torch.float32']" in shape
    assert "['(2, 3) torch.bfloat16']" in dtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "action"),
    [
        ("sleeps", "0WAIT_B0>1@1: Timed out waiting 3000ms"),
        ("sleeps before receiving", "0WAIT_SEND_F0>1@1: Timed out waiting 3000ms"),
        ("ends", "0WAIT_B0>1@1: Connection closed by peer"),
    ],
)
def test_lost_peer_is_reported_with_action(outcomes, trouble, action):
    text = outcomes[0][trouble]
    assert text.startswith(f"rank 0 lost rank 1 in action {action}")
    assert "parallel.timeout_s" in text


def test_groups_of_different_sizes_receive_once():
    """Tensor-parallel groups have sizes 2 and 1, and sizes 1 and 2."""
    assert run_distributed(_between_groups, 3) == [[2.0, 1.0], [2.0, 0.0], [0.0, 0.0]]


def _between_groups() -> list[float]:
    """Return the sender of the tensor that this rank receives, for both groupings."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    rank, spec = float(dist.get_rank()), (TensorSpec((1,), torch.float32),)
    senders = []
    for groups in ([[0, 1], [2]], [[0], [1, 2]]):
        channels = P2PChannels(CPU, groups, 20.0)
        channels.warm_up([(0, 1), (1, 0)])
        peer = 1 - channels.plan_rank
        sending = channels.send((torch.tensor([rank]),), spec, peer, "send")
        (arrived,) = channels.receive(spec, peer, "receive").wait("receive")
        sending.wait("send")
        senders.append(arrived.item())
    return senders


GROUPINGS = [([0, 1], [2, 3, 4]), ([0, 1, 2, 3], [4]), ([1], [0, 2, 3, 4]), ([0, 1, 2], [3, 4])]


def test_slices_are_redistributed_between_group_sizes():
    """Every token is sent once to its rank in the other group, including padding."""
    for groups, received in zip(
        GROUPINGS, zip(*run_distributed(_redistribute, 5), strict=True), strict=True
    ):
        for group in groups:
            slices = [received[rank] for rank in group]
            assert len({len(tokens) for tokens in slices}) == 1
            assert [row for tokens in slices for row in tokens] == list(range(12)), (groups, slices)


def _redistribute() -> list[list[float]]:
    """Return the tokens of the other group that this rank receives, of 12 tokens, per grouping."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    rank, received = dist.get_rank(), []
    for groups in GROUPINGS:
        channels = P2PChannels(CPU, groups, 20.0)
        channels.warm_up([(0, 1), (1, 0)])
        group = channels.plan_rank
        if group > 1:
            received.append([])
            continue
        group_size, peer_size = len(groups[group]), len(groups[1 - group])
        size = 12 // group_size
        index = groups[group].index(rank)
        rows = torch.arange(index * size, (index + 1) * size, dtype=torch.float32)[:, None]
        spec = [TensorSpec((size, 1), torch.float32)]
        sending = channels.send((rows,), spec, 1 - group, "send", [(group_size, peer_size)])
        (arrived,) = channels.receive(spec, 1 - group, "receive", [(peer_size, group_size)]).wait(
            "receive"
        )
        sending.wait("send")
        received.append(arrived[:, 0].tolist())
    return received
