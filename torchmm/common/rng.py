"""Seeding, and RNG state of a process without pickle.

The RNG state defines the next dropout masks and Python random numbers of a rank. It is stored per
rank, because ranks with the state of rank 0 would have equal dropout masks. The state consists of
uint8 tensors, so checkpoints store it like other tensors. States of Python and NumPy are JSON text
in these tensors, because checkpoints must be loadable without trusting pickle.
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
    """Seed Python, NumPy and torch (CPU and CUDA) of this process.

    Args:
        seed: Seed of the run.
        coordinates: Numbers of a separate stream, such as the data-parallel rank, or the step at
            which a run resumes on a different number of ranks. Ranks of one tensor-parallel group
            need equal streams, and therefore equal coordinates. Without coordinates, all ranks have
            the same stream.
    """
    text = json.dumps([seed, *coordinates])
    digest = hashlib.sha256(text.encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "little"))  # noqa: NPY002 - libraries draw from it
    torch.manual_seed(int.from_bytes(digest[:8], "little"))


def capture_rng() -> dict[str, Tensor]:
    """Return the RNG state of this process as uint8 vectors.

    The keys are "python", "numpy", "torch" and, with CUDA, "cuda" (the current device).
    """
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
    """Restore the RNG state of `capture_rng`. "cuda" is ignored without a CUDA device."""
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
