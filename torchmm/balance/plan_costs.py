"""Costs of the tasks and messages of one step, for planners and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import Message, Task


class LayerPiece(NamedTuple):
    """Part of an encoder layer between two stop points."""

    compute_fraction: float
    """Fraction of the computation of the layer."""
    starts_collective: bool
    """Whether the piece ends with the start of a collective."""


class LayerPieces(NamedTuple):
    """Pieces of an encoder layer."""

    forward: tuple[LayerPiece, ...]
    backward: tuple[LayerPiece, ...]


@dataclass(frozen=True)
class PlanCosts:
    """Costs of every action of one step, independent of the order.

    Except in `compute_ms`, missing keys have the value 0.

    Attributes:
        compute_ms: Duration of every F, B, I and W action that a plan can contain, with exposed
            tensor-parallel communication.
        tp_comm_ms: Exposed tensor-parallel communication of each action, included in `compute_ms`.
        gather_ms: Time to all-gather the parameters of each stage (UNSHARD).
        reduce_ms: Time to reduce the gradients of each stage (REDUCE_GRAD).
        tied_ms: Time to sum the gradients of the tied weight of each stage (REDUCE_TIED).
        transfer_ms: Transfer time by (message, whether it is the gradient). 0 on the same rank.
        saved_bytes: Activations of each task from its F until its B or W. If a task has no
            backward, until the end of F.
        saved_for_weights_bytes: Bytes of each task between its I and its W. They include gradients
            and can exceed `saved_bytes`.
        temporary_bytes: Additional bytes while an action runs, beyond the temporaries in
            `static_bytes`.
        static_bytes: Bytes of each rank of the plan: weights, gradients, optimizer state, the
            microbatches of the step, and the largest temporary of its tasks.
        update_bytes: Bytes of each rank during the optimizer update, after all tasks.
        memory_limit_bytes: Memory limit of every rank. None for no limit.
        overlaps_communication: Whether the device computes during communication, as GPUs do.
        flops: Model FLOPs of every action in `compute_ms` without recomputation, on all ranks of a
            tensor-parallel group together. Mirrors have their fraction.
        pieces: Pieces of a layer of each encoder, which can run during collectives of the LLM.
        collectives: Number of these collectives in the forward and backward pass of an LLM layer.
    """

    compute_ms: Mapping[Action, float]
    tp_comm_ms: Mapping[Action, float] = field(default_factory=dict)
    gather_ms: Mapping[int, float] = field(default_factory=dict)
    reduce_ms: Mapping[int, float] = field(default_factory=dict)
    tied_ms: Mapping[int, float] = field(default_factory=dict)
    transfer_ms: Mapping[tuple[Message, bool], float] = field(default_factory=dict)
    saved_bytes: Mapping[Task, int] = field(default_factory=dict)
    saved_for_weights_bytes: Mapping[Task, int] = field(default_factory=dict)
    temporary_bytes: Mapping[Action, int] = field(default_factory=dict)
    static_bytes: tuple[int, ...] = ()
    update_bytes: tuple[int, ...] = ()
    memory_limit_bytes: int | None = None
    flops: Mapping[Action, float] = field(default_factory=dict)
    overlaps_communication: bool = False
    pieces: Mapping[str, LayerPieces] = field(default_factory=dict)
    collectives: tuple[int, int] = (0, 0)
