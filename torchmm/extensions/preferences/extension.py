"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.common.extensions import Entries, Entry


def _trains_on_pairs(run: Any) -> bool:
    return run.recipe.training.loss == "preference"


ENTRIES: Entries = {
    "sections": [
        Entry("Recipe.preference", "torchmm.extensions.preferences.section:PreferenceConfig"),
    ],
    "recipe_checks": [
        Entry("preference", "torchmm.extensions.preferences.checks:check_preference"),
    ],
    "loaded_models": [
        Entry(
            "preference",
            "torchmm.extensions.preferences.reference:prepare_preference_loss",
            _trains_on_pairs,
        ),
    ],
    "hooks": [
        Entry(
            "preference",
            "torchmm.extensions.preferences.hook:PreferenceHook",
            _trains_on_pairs,
        ),
    ],
}
