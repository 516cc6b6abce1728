"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.common.extensions import Entries, Entry

_COMPACT = "torchmm.extensions.low_precision.low_precision_optimizer:LowPrecisionOptimizer"


def _uses_float8(recipe: Any) -> bool:
    return recipe.float8.scaling != "none"


def _uses_quantization(recipe: Any) -> bool:
    return recipe.quantization.quant_type != "none"


ENTRIES: Entries = {
    "sections": [
        Entry("Recipe.float8", "torchmm.extensions.low_precision.section:Float8Config"),
        Entry("Recipe.quantization", "torchmm.extensions.low_precision.section:QuantizationConfig"),
    ],
    "recipe_checks": [
        Entry("float8", "torchmm.extensions.low_precision.checks:check_float8"),
        Entry("quantization", "torchmm.extensions.low_precision.checks:check_quantization"),
    ],
    "optimizers": [
        Entry("compact_adamw", _COMPACT),
        Entry("compact_muon", _COMPACT),
    ],
    "model_converters": [
        Entry(
            "float8",
            "torchmm.extensions.low_precision.float8:Float8Converter",
            _uses_float8,
        ),
        Entry(
            "quantization",
            "torchmm.extensions.low_precision.quantization:QuantizationConverter",
            _uses_quantization,
        ),
    ],
}
