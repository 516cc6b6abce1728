"""A second communicator for the tensor-parallel ranks of modules that communicate at the same time.

Where encoders' pieces run during collectives of the LLM, and theirs during its computation (Optimus
§3.1, figure 7), a communicator that both share would put one collective behind the other. On NCCL
the two also differ in how much of the device they may take:

- The LLM's collectives have a stream of high priority: a piece that is launched beside one does not
  keep its blocks from being scheduled.
- Those of encoders, which run beside the LLM's products, have normal priority and `ENCODER_CTAS`
  blocks, so that they take few multiprocessors from these.

All ranks of a group issue the operations of both communicators in the same order (`bubbles`), which
NCCL asks for. Rejected: green contexts (`torch.cuda.green_contexts`), which give a kernel a part of
the device for good: pieces compute while nothing else does, so they may have all of it, and the
streams of communicators are NCCL's own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

ENCODER_CTAS = 4
"""Thread blocks of a collective of an encoder, at most; not measured."""


def with_own_groups(mesh: DeviceMesh, timeout: timedelta, launched: bool) -> DeviceMesh:
    """The mesh with new process groups along its last dimension. Collective over all ranks.

    Args:
        launched: whether they are those of encoders that run in pieces, or of the LLM.
    """
    groups = mesh.get_all_groups()
    rows = mesh.mesh.flatten(0, -2).tolist()
    options = _options(launched) if mesh.device_type == "cuda" else None
    names = mesh.mesh_dim_names
    own, _ = dist.new_subgroups_by_enumeration(
        rows,
        timeout=timeout,
        pg_options=options,
        group_desc="launched" if launched else "launching",
    )
    return DeviceMesh.from_group(
        [*groups[:-1], own], mesh.device_type, mesh.mesh, mesh_dim_names=names
    )


def _options(launched: bool) -> Any:
    """Of NCCL; as far as this build of it knows them."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=not launched)
    if launched and hasattr(options.config, "max_ctas"):
        options.config.max_ctas = ENCODER_CTAS
    return options
