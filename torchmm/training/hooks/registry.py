"""The table of hooks.

A new hook of the core is a file in this folder and an entry in `HOOKS`. An extension adds hooks
with entries of the table "hooks" (`torchmm.common.extensions`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torchmm.common.extensions import Entry, find_entries
from torchmm.training.hooks.hook import Hook, TrainingContext

HOOKS: Sequence[Entry] = (
    Entry(
        "validation",
        "torchmm.training.hooks.validation:ValidationHook",
        lambda run: run.recipe.validation.interval > 0,
    ),
    Entry("recording", "torchmm.training.hooks.recording:RecordingHook"),
    Entry(
        "early_stopping",
        "torchmm.training.hooks.early_stopping:EarlyStoppingHook",
        lambda run: run.recipe.validation.early_stopping_patience > 0,
    ),
    Entry("garbage_collection", "torchmm.training.hooks.garbage_collection:GarbageCollectionHook"),
    Entry("exports", "torchmm.training.hooks.exports:ExportHook"),
    Entry("checkpoints", "torchmm.training.hooks.checkpoints:CheckpointHook"),
)
"""Hooks of the core, in execution order.

The argument of `is_used` is the `ResolvedRecipe`, and its result is identical on all ranks.
Modules of unused hooks are not imported.

Hooks that measure metrics run before "recording". "checkpoints" runs after all hooks that change
the training state, and its `finish` waits for the last save.
"""


def order_hooks(hooks: Sequence[Entry], added: Sequence[Entry]) -> list[Entry]:
    """Insert the hooks of extensions after the hooks that they name, and return all hooks."""
    ordered = list(hooks)
    for entry in added:
        names = ["", *(existing.name for existing in ordered)]
        ordered.insert(names.index(entry.after), entry)
    return ordered


def build_hooks(training: TrainingContext) -> list[Hook]:
    """Return the hooks of a run in execution order."""
    run = training.components.run
    entries = order_hooks(HOOKS, find_entries("hooks"))
    return [entry.load()(training) for entry in entries if entry.is_used(run)]
