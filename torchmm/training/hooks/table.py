"""The table of hooks. A new hook is a file in this folder and an entry in `HOOKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

from torchmm.planning.resolved import Resolved
from torchmm.training.hooks.hook import Hook, Training


class HookEntry(NamedTuple):
    """A hook in the table."""

    name: str
    """Class name in the module of `torchmm.training.hooks` that has the name of the entry."""
    is_used: Callable[[Resolved], bool] = lambda run: True
    """Function that returns True if a run needs the hook. Equal on all ranks."""


def _has_diagnostics(run: Resolved) -> bool:
    metrics = run.recipe.metrics
    return any((metrics.timeline_step, metrics.profile_step, metrics.memory_snapshot_step))


HOOKS: Mapping[str, HookEntry] = MappingProxyType(
    {
        "diagnostics": HookEntry("DiagnosticsHook", _has_diagnostics),
        "validation": HookEntry("ValidationHook", lambda run: run.recipe.validation.interval > 0),
        "recording": HookEntry("RecordingHook"),
        "garbage_collection": HookEntry("GarbageCollectionHook"),
        "exports": HookEntry("ExportHook"),
        "checkpoints": HookEntry("CheckpointHook"),
        "benchmarks": HookEntry(
            "BenchmarkHook", lambda run: run.recipe.validation.benchmarks.interval > 0
        ),
    }
)
"""Hooks by module name, in the order in which they run. Modules of unused hooks are not imported.

Hooks that measure run before "recording". "checkpoints" comes after all hooks that change the
training state, and its `finish` waits for the last save. "benchmarks" comes after it, because rank
0 may wait for scores longer than other ranks wait for rank 0.
"""


def build_hooks(training: Training) -> list[Hook]:
    """Return the hooks of a run, in the order of the table."""
    hooks: list[Hook] = []
    for module, entry in HOOKS.items():
        if entry.is_used(training.parts.run):
            factory = getattr(import_module(f"torchmm.training.hooks.{module}"), entry.name)
            hooks.append(factory(training))
    return hooks
