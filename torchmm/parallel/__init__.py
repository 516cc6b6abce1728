"""Ranks: meshes, FSDP2, tensor parallelism, point-to-point messages, health of peers.

Imports `common`, `recipe` and `models`. Begin with `apply.py`, whose order is the documentation,
and `mesh.py`. `torch_private.py` is the only door to private parts of torch.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "apply": ("parallelize",),
        "mesh": ("ParallelMesh", "build_mesh", "select_device", "start_process_group"),
        "p2p": ("P2PChannels",),
    },
)
