"""The sections `[float8]` and `[quantization]` of recipes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmm.common.module_names import LLM
from torchmm.recipe.section import Section


class Float8Config(Section):
    """Float8 matmuls in transformer layers, with torchao.

    Requires an Ada, Hopper or later GPU and `training.dtype` = "bfloat16". See
    docs/guides/speed.md.
    """

    scaling: Literal["none", "rowwise", "tensorwise"] = "none"
    """Scaling of float8 values. "rowwise" has a scale per row and column and is more accurate.
    "tensorwise" has a scale per tensor and is faster. "none" disables float8."""
    modules: list[str] = Field(default=[LLM])
    """Names of modules whose layers use float8."""
    first_layers: int = Field(default=1, ge=0)
    """Number of layers at the start of a module that stay in `training.dtype`."""
    last_layers: int = Field(default=1, ge=0)
    """Number of layers at the end of a module that stay in `training.dtype`."""
    exclude: list[str] = Field(default=["*.gate", "*router*"])
    """Name patterns of linear layers that stay in `training.dtype`, such as "mlp.down_proj" or
    "self_attn.*". Linear layers with sizes that are not multiples of 16 also stay."""
    emulate: bool = False
    """Whether to round to float8 but multiply in `training.dtype`. This works on any device and is
    slow."""

    def applies_to(self, module: str) -> bool:
        """Return True if the layers of the module use float8."""
        return self.scaling != "none" and module in self.modules


class QuantizationConfig(Section):
    """Quantization of frozen weights (QLoRA, arXiv 2305.14314).

    The weights of linear layers in transformer layers are stored in 4 bits, and decoded to
    `training.dtype` for each matmul. See docs/get_started/lora.md.
    """

    quant_type: Literal["none", "nf4"] = "none"
    """Data type of the stored weights. "nf4" has 16 values and one float32 scale per 64 weights, as
    in bitsandbytes without double quantization: 4.5 bits per weight. "none" disables
    quantization."""
    modules: list[str] = Field(default=[LLM])
    """Names of quantized modules. Their weights must be frozen: a module has an adapter or is in
    `freeze.modules`. Embeddings, LM heads, norms and connectors are not quantized."""

    def applies_to(self, module: str) -> bool:
        """Return True if the weights of the module are quantized."""
        return self.quant_type != "none" and module in self.modules
