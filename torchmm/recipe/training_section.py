"""The recipe's section about recomputation: `[activation_checkpoint]`.

Part of the schema in `torchmm.recipe.recipe`, from where everything is imported.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from torchmm.recipe.model_section import Section

FixedMode = Literal["none", "selective", "full"]
Mode = Literal["none", "selective", "full", "tuned"]
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "%": 0.01}


class ActivationCheckpointConfig(Section):
    """What backward recomputes instead of keeping."""

    mode: Mode = "none"
    """"none" keeps all activations; "full" keeps only layer inputs; "selective" keeps the results
    of matrix products and attention and recomputes the rest; "tuned" chooses one of these for every
    layer and microbatch, anew in every step, so that memory is used up to `memory_limit` and as
    little as possible is recomputed."""
    modules: dict[str, Mode] = Field(default={})
    """Mode by module name, instead of `mode`."""
    memory_limit: str = "85%"
    """With mode "tuned": what a rank may use, of the device's memory ("85%", on a CPU of what
    `simulation.device` says) or as an amount ("60 GiB", "512 MiB"). It counts weights, gradients,
    optimizer state, messages and activations; leave room for temporaries inside of layers and what
    the allocator cannot use. A step that does not fit with everything recomputed is refused."""
    offload: bool = True
    """With mode "tuned", on devices with memory of their own: whether inputs of recomputed layers
    may wait in the host's memory where that costs the least time. Never for compiled modules."""

    def fixed_mode(self, module: str) -> FixedMode:
        """Mode of all tasks of a module; "none" where plans choose, whose costs come on top."""
        mode = self.modules.get(module, self.mode)
        return "none" if mode == "tuned" else mode

    def tunes(self, module: str) -> bool:
        """Whether plans choose what the module's layers recompute."""
        return self.modules.get(module, self.mode) == "tuned"


def limit_bytes(limit: str, device_bytes: float) -> int:
    """The bytes that a memory limit stands for.

    Args:
        limit: as in the recipe.
        device_bytes: memory of the device, of which it may be a share.

    Raises:
        ValueError: it is neither a share nor an amount.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|%)\s*", limit)
    number = float(found[1]) if found else 0.0
    if found is None or number == 0 or (found[2] == "%" and number > 100):
        raise ValueError(
            'is no memory limit; give a share of the device ("85%") or an amount ("60 GiB", '
            '"512 MiB"), more than 0'
        )
    scale = _UNITS[found[2]]
    return round(number * scale * (device_bytes if found[2] == "%" else 1))
