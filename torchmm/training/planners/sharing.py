"""Share the plan of a step: the first rank of a pipeline plans, the other ranks decode the plan.

    numbers = shared.exchange(step, digest, numbers)     collective over all ranks

Every rank could plan the step. But lowering and checking a plan takes microseconds per action of
all ranks, and decoding it takes 0.2 microseconds per action of one rank. Before the plan is sent,
all ranks compare a digest of the inputs: microbatches, stages, `[parallel]`. If the digests of two
ranks differ or a plan cannot be made, all ranks of the run raise the same error before the step
starts.

Each step has one all-reduce of a few numbers per data-parallel rank, over all ranks, and a
broadcast of the plan in each pipeline. Neither depends on the result of planning.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from math import inf

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.parallel.gather import gather_texts, host_collective_device
from torchmm.parallel.mesh import ParallelMesh

MAX_SHOWN_RANKS = 8
"""Maximum number of ranks in an error message."""


def plan_input_digest(fixed: str, metas: Sequence[MicrobatchMeta]) -> int:
    """Return a digest of the inputs of planning, an integer of 48 bits that float64 represents.

    Args:
        fixed: Inputs that do not change during a run.
        metas: Microbatches of the step.
    """
    text = f"{fixed}{list(metas)}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")


class PlanExchange:
    """Exchange of plans in the pipeline of this rank. Construction is collective over all ranks.

    Attributes:
        leads: Whether this rank makes the plans.
        leaders: Number of ranks on this host that make plans.
        group: Process group of the pipeline ranks, on the CPU.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))  # set by torchrun
        self._mesh = mesh
        self.leaders = 0
        for pipeline_ranks in mesh.global_ranks:
            members = [rank for ranks in pipeline_ranks for rank in ranks]
            group = dist.new_group(members, backend="gloo")
            self.leaders += members[0] // local_size == mesh.rank // local_size
            if mesh.rank in members:
                self.group = group
                self._leader = members[0]
        self.is_leader = mesh.rank == self._leader

    def exchange(
        self,
        step: int,
        digest: int,
        numbers: NDArray[np.int32] | None,
        problems: Sequence[str] = (),
    ) -> NDArray[np.int32]:
        """Return the encoded plan of the first rank of the pipeline. Collective over all ranks.

        Args:
            step: Number of the step.
            digest: Digest of the inputs of planning on this rank.
            numbers: Encoded plan. None on all ranks but the first.
            problems: Reasons why the first rank could not plan the step.

        Raises:
            PlanError: A rank could not plan its step, or ranks have different inputs.
        """
        # One row per data-parallel rank. The ranks of a row have identical digests if the maximum
        # digest equals the minimum, which is the negative of the maximum of the negative digests.
        length = 0 if numbers is None else len(numbers)
        headers = torch.full((self._mesh.data_parallel_size, 4), -inf, dtype=torch.float64)
        local = [float(digest), -float(digest), float(bool(problems)), float(length)]
        headers[self._mesh.data_parallel_rank] = torch.tensor(local, dtype=torch.float64)
        headers = headers.to(host_collective_device())
        dist.all_reduce(headers, dist.ReduceOp.MAX)
        rows = headers.tolist()
        if any(has_problem for *_, has_problem, _ in rows):
            problems_of_ranks = [
                json.loads(text) for text in gather_texts(json.dumps(list(problems)))
            ]
            raise PlanError(
                next(some_problems for some_problems in problems_of_ranks if some_problems)
            )
        if any(highest != -lowest for highest, lowest, *_ in rows):
            raise PlanError(self._differing(step, gather_texts(str(digest))))
        if numbers is None:
            numbers = np.zeros(int(rows[self._mesh.data_parallel_rank][-1]), np.int32)
        dist.broadcast(torch.from_numpy(numbers), self._leader, group=self.group)
        return numbers

    def _differing(self, step: int, digests: Sequence[str]) -> list[str]:
        """Return messages about ranks whose digest differs from that of the first pipeline rank."""
        messages = []
        for pipeline_ranks in self._mesh.global_ranks:
            members = [rank for ranks in pipeline_ranks for rank in ranks]
            differing = [rank for rank in members if digests[rank] != digests[members[0]]]
            if differing:
                more = (
                    f" and {len(differing) - MAX_SHOWN_RANKS} more"
                    if len(differing) > MAX_SHOWN_RANKS
                    else ""
                )
                messages.append(
                    f"step {step}: ranks {differing[:MAX_SHOWN_RANKS]}{more} have different "
                    f"microbatches or stages than rank {members[0]} of the same pipeline, because "
                    "they read different data or a different recipe. Compare the data "
                    "(data.index_cache_dir) and the torchmm versions of their nodes"
                )
        return messages
