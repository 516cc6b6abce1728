"""Seeding, and saving and restoring the random state of one process without pickle.

A rank's random state is what its next dropout mask or Python draw depends on. It belongs to the
rank, never to the job: replicating rank 0's state over the others repeats its dropout masks. The
state is kept as uint8 tensors, so a checkpoint stores it like any other tensor; Python's and
NumPy's generators are JSON text inside them. Rejected: pickling `random.getstate()`, as a
checkpoint must be loadable without trusting it.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int, *coordinates: int) -> None:
    """Seeds Python, NumPy and torch (CPU and CUDA) of this process.

    Args:
        seed: the run's seed.
        coordinates: what has a separate stream, e.g. the data-parallel rank (ranks of
            one tensor-parallel group must agree and therefore share coordinates) or the step of
            a resume on another number of ranks. None: the same stream on every rank.
    """
    text = json.dumps([seed, *coordinates])
    digest = hashlib.sha256(text.encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "little"))  # noqa: NPY002 - libraries draw from it
    torch.manual_seed(int.from_bytes(digest[:8], "little"))


def capture_rng() -> dict[str, Tensor]:
    """Random state of this process: uint8 vectors "python", "numpy", "torch" and, with CUDA,
    "cuda" (the current device)."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    assert isinstance(numpy_state, dict)
    key = numpy_state["state"]["key"].tolist()
    state = {
        "python": _to_bytes([version, list(words), gauss]),
        "numpy": _to_bytes({**numpy_state, "state": {**numpy_state["state"], "key": key}}),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Tensor]) -> None:
    """Puts back what `capture_rng` returned; "cuda" is ignored where there is no CUDA device."""
    version, words, gauss = _from_bytes(state["python"])
    random.setstate((version, tuple(words), gauss))
    numpy_state = _from_bytes(state["numpy"])
    key = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    numpy_state["state"] = {**numpy_state["state"], "key": key}
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _to_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(bytes(data.cpu().numpy()))
