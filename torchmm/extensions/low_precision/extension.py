"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.common.extensions import Entries, Entry

_COMPACT = "torchmm.extensions.low_precision.low_precision_optimizer:LowPrecisionOptimizer"


def _uses_float8(recipe: Any) -> bool:
    return recipe.float8.scaling != "none"


ENTRIES: Entries = {
    "sections": [
        Entry("Recipe.float8", "torchmm.extensions.low_precision.section:Float8Config"),
    ],
    "recipe_checks": [
        Entry("float8", "torchmm.extensions.low_precision.checks:check_float8"),
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
    ],
}
