"""The section `[float8]` of recipes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmm.common.module_names import LLM
from torchmm.recipe.section import Section


class Float8Config(Section):
    """Matrix products of transformer layers in float8 (torchao; GPUs from Ada and Hopper on)."""

    scaling: Literal["none", "rowwise", "tensorwise"] = "none"
    """How values are scaled before they are cast: each row and column for itself (more exact), or
    the whole tensor (faster). "none": products are in `training.dtype`."""
    modules: list[str] = Field(default=[LLM])
    """Names of modules whose layers compute in float8."""
    first_layers: int = Field(default=1, ge=0)
    """Layers at a module's beginning that stay in `training.dtype`."""
    last_layers: int = Field(default=1, ge=0)
    """The same at its end."""
    exclude: list[str] = Field(default=["*.gate", "*router*"])
    """Patterns of names of linears within a layer ("mlp.down_proj", "self_attn.*") that do, too.
    So do those whose sizes are no multiples of 16."""
    emulate: bool = False
    """Round as float8 does, but multiply in `training.dtype`: on any device, and slowly."""

    def concerns(self, module: str) -> bool:
        """Whether the module's layers compute in float8."""
        return self.scaling != "none" and module in self.modules
