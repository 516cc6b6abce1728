"""One plan on all ranks of a pipeline: made and checked by the first, read by the others.

    planned = shared.exchange(step, digest, planned)     collective over all ranks

Every rank knows what the step contains, and could plan it; but lowering and checking take
microseconds for every action of all ranks, reading a fifth of one for the rank's own. What could
differ is compared instead: before a plan is sent, all ranks show a digest of what it is made from
(microbatches, stages, the section of the recipe). If that of one rank is another one, or a plan
cannot be made, all ranks of the run end with the same error, before anything of the step has begun.

Per step it is one collective of a few numbers for every data-parallel rank, over all ranks, and a
broadcast of the plan in each pipeline; neither depends on what was found.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from enum import IntEnum
from math import inf

import numpy as np
import torch
import torch.distributed as dist

from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.parallel.gather import exchange_device, gather_texts
from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.planned_step import PlannedStep

SHOWN = 8
"""Ranks that an error names."""


class _Header(IntEnum):
    """Numbers of a data-parallel rank, of which all ranks get the largest; what is unknown is
    negative and infinite."""

    DIGEST = 0
    NEGATIVE_DIGEST = 1
    """The largest of it is the smallest digest."""
    PROBLEM = 2
    LENGTH = 3
    """Numbers of the plan."""
    PLANNER_MS = 4
    EVALUATIONS = 5
    PREDICTED_MS = 6
    GAIN = 7


def digest_of(fixed: str, metas: Sequence[MicrobatchMeta]) -> int:
    """What a plan is made from, as a number that a float64 holds.

    Args:
        fixed: what stays the same during a run.
    """
    text = f"{fixed}{list(metas)}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")


class SharedPlans:
    """Of the pipeline that this rank is part of. Creating it is collective over all ranks.

    Attributes:
        leads: whether this rank makes the plans.
        leaders: ranks of this machine that do.
        group: of the pipeline's ranks, on the CPU.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))  # torchrun's
        self._mesh = mesh
        self.leaders = 0
        for share in mesh.shares:
            members = [rank for alike in share for rank in alike]
            group = dist.new_group(members, backend="gloo")
            self.leaders += members[0] // here == mesh.rank // here
            if mesh.rank in members:
                self.group = group
                self._leader = members[0]
        self.leads = mesh.rank == self._leader

    def exchange(
        self, step: int, digest: int, planned: PlannedStep | None, problems: Sequence[str] = ()
    ) -> PlannedStep:
        """What the first rank of the pipeline has, on all of its ranks; collective over all ranks.

        Args:
            digest: of what this rank would have planned from.
            planned: the plan; None on all ranks but the first.
            problems: why there is none, there.

        Raises:
            PlanError: a rank could not plan its step, or would have planned another one.
        """
        headers = torch.full(
            (self._mesh.data_parallel_size, len(_Header)), -inf, dtype=torch.float64
        )
        own = headers[self._mesh.data_parallel_rank]
        own[_Header.DIGEST] = float(digest)
        own[_Header.NEGATIVE_DIGEST] = -float(digest)
        own[_Header.PROBLEM] = float(bool(problems))
        if planned is not None:
            _describe(planned, own)
        headers = headers.to(exchange_device())
        dist.all_reduce(headers, dist.ReduceOp.MAX)
        rows = headers.tolist()
        if any(row[_Header.PROBLEM] for row in rows):
            raise PlanError(_first(gather_texts(json.dumps(list(problems)))))
        if any(row[_Header.DIGEST] != -row[_Header.NEGATIVE_DIGEST] for row in rows):
            raise PlanError(self._differing(step, gather_texts(str(digest))))
        header = rows[self._mesh.data_parallel_rank]
        numbers = np.zeros(int(header[_Header.LENGTH]), np.int32)
        sent = torch.from_numpy(numbers if planned is None else planned.numbers)
        dist.broadcast(sent, self._leader, group=self.group)
        return _read(step, header, sent.numpy(), None if planned is None else planned.planner)

    def _differing(self, step: int, digests: Sequence[str]) -> list[str]:
        """Which ranks are not as the first of their pipeline, by the digests of all ranks."""
        found = []
        for share in self._mesh.shares:
            members = [rank for alike in share for rank in alike]
            other = [rank for rank in members if digests[rank] != digests[members[0]]]
            if other:
                more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
                found.append(
                    f"step {step}: ranks {other[:SHOWN]}{more} have other microbatches or stages "
                    f"than rank {members[0]}, with which they share a plan: they do not read the "
                    "same data, or not the same recipe. Compare the data of their machines "
                    "(data.index_cache) and the versions of torchmm"
                )
        return found


def _first(texts: Sequence[str]) -> list[str]:
    """The problems of the first rank that has some."""
    every = (json.loads(text) for text in texts)
    return next(problems for problems in every if problems)


def _describe(planned: PlannedStep, header: torch.Tensor) -> None:
    header[_Header.LENGTH] = len(planned.numbers)
    header[_Header.PLANNER_MS] = planned.planner_ms
    for place, value in (
        (_Header.EVALUATIONS, planned.evaluations),
        (_Header.PREDICTED_MS, planned.predicted_ms),
        (_Header.GAIN, planned.gain_over_natural),
    ):
        header[place] = -inf if value is None else value


def _read(step: int, header: list[float], numbers: np.ndarray, planner: str | None) -> PlannedStep:
    predicted_ms, gain = (
        None if header[place] == -inf else header[place]
        for place in (_Header.PREDICTED_MS, _Header.GAIN)
    )
    evaluations = header[_Header.EVALUATIONS]
    return PlannedStep(
        step,
        numbers,
        header[_Header.PLANNER_MS],
        planner,
        predicted_ms,
        gain,
        None if evaluations == -inf else int(evaluations),
    )
