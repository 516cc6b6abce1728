"""A simple count of the bytes that the ranks of a plan hold."""

from collections.abc import Sequence

from torchmm.pipelining.checks.rules import MemoryModel
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.actions import ActionType as T
from torchmm.pipelining.plan.graph import Task
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.transfers import transfers


def naive_memory(
    plan: PipelinePlan, model: MemoryModel, static_bytes: Sequence[int]
) -> list[list[int]]:
    """Return bytes by rank and position, from the lifetime of each tensor."""
    where = {a: i for program in plan.actions for i, a in enumerate(program)}
    usage = [[n] * len(p) for n, p in zip(static_bytes, plan.actions, strict=True)]

    def hold(rank: int, nbytes: int, first: int, last: int) -> None:
        for position in range(first, last + 1):
            usage[rank][position] += nbytes

    def backward(task: Task) -> int:
        return min(where.get(Action(kind, *task), 10**9) for kind in (T.B, T.I))

    for task in plan.graph.tasks():
        forward = where[Action(T.F, *task)]
        if plan.training and plan.graph.needs_backward(task.stage, task.microbatch):
            rank, kept, end = plan.graph.rank(task), model.saved_bytes(task), backward(task)
            last = where.get(Action(T.W, *task), end)
            assert model.saved_for_weights_bytes is not None
            for_weights = model.saved_for_weights_bytes(task) if last > end else 0
            hold(rank, kept, forward, end)
            hold(rank, max(0, for_weights - kept), end, end)
            hold(rank, for_weights, end + 1, last)
    for t in transfers(plan.graph, plan.training):
        nbytes = sum(s.nbytes for s in plan.specs[t.message] if s.requires_grad or not t.backward)
        used = backward(t.consumer) if t.backward else where[Action(T.F, *t.consumer)]
        produced = backward(t.producer) if t.backward else where[Action(T.F, *t.producer)]
        if t.source == t.destination:
            hold(t.source, nbytes, produced, used)
        else:
            kinds = ("SEND_B", "WAIT_SEND_B", "RECV_B") if t.backward else (
                "SEND_F", "WAIT_SEND_F", "RECV_F")  # fmt: skip
            send, wait, receive = (T(kind) for kind in kinds)
            hold(t.source, nbytes, where[t.source_action(send)], where[t.source_action(wait)])
            hold(t.destination, nbytes, where[t.destination_action(receive)], used)
    return usage
