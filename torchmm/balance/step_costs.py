"""What the tasks and messages of one step cost: the data that planners and the simulator read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import Message, Task


class Piece(NamedTuple):
    """Part of an encoder layer between two stops."""

    share: float
    """Fraction of the layer's computation."""
    sends: bool
    """Whether it ends with the start of a collective."""


class LayerPieces(NamedTuple):
    """Pieces of an encoder layer."""

    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]


@dataclass(frozen=True)
class PlanCosts:
    """Costs of every action of one step, whatever the order they are planned in.

    Attributes:
        compute_ms: of every F, B, I and W that a plan of the step may hold: the whole duration,
            exposed tensor-parallel communication included.
        tensor_ms: of these, exposed tensor-parallel communication; 0 where missing.
        gather_ms: by stage: gathering its parameters over data-parallel ranks (UNSHARD).
        reduce_ms: by stage: reducing its gradients (REDUCE_GRAD).
        tied_ms: by stage: exchanging the gradient of a weight that another stage has a copy of
            (REDUCE_TIED); 0 where missing.
        transfer_ms: by (message, whether it is the gradient that goes back): time on the wire;
            0 where missing, as for messages that stay on a rank.
        kept_bytes: by task: activations from its F until its B or W (until the end of F for a task
            without a backward).
        kept_for_weights_bytes: by task: what stays between its I and its W; with gradients that
            wait there, it may be more than `kept_bytes`.
        temporary_bytes: by action: more while it runs, beyond the temporaries in `static_bytes`; 0
            where missing.
        static_bytes: by rank of the plan: weights, gradients, optimizer state, the step's
            microbatches, and the largest temporary of any of its tasks.
        update_bytes: by rank: what the optimizer's update has in use, after all tasks; none where
            missing.
        memory_limit_bytes: of every rank; None: unlimited.
        runs_beside: whether the device computes while it communicates, as GPUs do.
        flops: model FLOPs of every action in `compute_ms`, recomputation left out, on all ranks of
            a tensor-parallel group together; of a mirror, its share.
        pieces: by encoder: pieces of a layer, which may run during collectives of the LLM.
        collectives: number of these collectives in an LLM layer's forward and backward.
    """

    compute_ms: Mapping[Action, float]
    tensor_ms: Mapping[Action, float] = field(default_factory=dict)
    gather_ms: Mapping[int, float] = field(default_factory=dict)
    reduce_ms: Mapping[int, float] = field(default_factory=dict)
    tied_ms: Mapping[int, float] = field(default_factory=dict)
    transfer_ms: Mapping[tuple[Message, bool], float] = field(default_factory=dict)
    kept_bytes: Mapping[Task, int] = field(default_factory=dict)
    kept_for_weights_bytes: Mapping[Task, int] = field(default_factory=dict)
    temporary_bytes: Mapping[Action, int] = field(default_factory=dict)
    static_bytes: tuple[int, ...] = ()
    update_bytes: tuple[int, ...] = ()
    memory_limit_bytes: int | None = None
    flops: Mapping[Action, float] = field(default_factory=dict)
    runs_beside: bool = False
    pieces: Mapping[str, LayerPieces] = field(default_factory=dict)
    collectives: tuple[int, int] = (0, 0)
