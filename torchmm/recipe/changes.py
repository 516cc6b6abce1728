"""Compare two recipes, and translate names of earlier versions.

    changes(old, new)             lines with the values that differ between two recipes
    with_current_names(tables)    tables of an earlier version with the names of this version
    reject_renamed_options(...)   options of earlier versions exit with an error

Recipes with former names are rejected, with the new name in the error. Runs, checkpoints and
exports of earlier versions are readable.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

_LONGEST_VALUE = 40
_ABSENT = "(not set)"

RENAMED_KEYS: Mapping[str, str] = {
    "parallel.orchestrate": "parallel.auto_sizes",
    "parallel.replan_drift": "parallel.replan_threshold",
    "parallel.bubbles": "parallel.bubble_granularity",
    "parallel.tensor_bubbles": "parallel.tp_comm_fraction",
    "parallel.preflight": "parallel.slow_rank_threshold",
    "parallel.search.time_share": "parallel.search.time_fraction",
    "data.open_packs": "data.packing_buffer_size",
    "data.max_delay_steps": "data.packing_max_wait_steps",
    "data.stages": "data.mixture_schedule",
    "data.index_cache": "data.index_cache_dir",
    "data.sources.generate": "data.sources.target_image_column",
    "data.sources.scores": "data.sources.metrics",
    "data.validation.generate": "data.validation.target_image_column",
    "data.validation.scores": "data.validation.metrics",
    "data.storage.give_up_s": "data.storage.retry_timeout_s",
    "data.producers.give_up_s": "data.producers.retry_timeout_s",
    "model.towers": "model.modalities",
    "model.encoders.*.shuffle": "model.encoders.*.pixel_shuffle_factor",
    "model.generator.time_sampling": "model.generator.timestep_sampling",
    "model.generator.vae.latents": "model.generator.vae.latent_mode",
    "model.generator.vae.frames_at_once": "model.generator.vae.encode_batch_size",
    "validation.drawings": "validation.generated_images",
    "validation.samples": "validation.num_samples",
    "checkpoint.keep": "checkpoint.keep_latest",
    "checkpoint.asynchronous": "checkpoint.async_save",
    "checkpoint.upload": "checkpoint.remote_dir",
    "checkpoint.staging": "checkpoint.staging_dir",
    "checkpoint.resume_changed_data": "checkpoint.allow_data_change",
    "float8.recipe": "float8.scaling",
    "optimizer.schedule": "optimizer.lr_schedule",
    "metrics.page": "metrics.html_report",
}
"""Maps a former key, without indices, to the key of this version in the same section. "*" is any
name."""
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "activation_checkpoint.mode": {"tuned": "auto"},
    "activation_checkpoint.modules.*": {"tuned": "auto"},
}
"""Maps former values of a key to values of this version."""
RENAMED_METRICS: Mapping[str, str] = {
    "images_per_s": "media_per_s",
    "generated_per_s": "generated_images_per_s",
    "decoded_images": "decoded_media",
    "read_bytes": "data_read_bytes",
    "graphs": "compiled_graphs",
    "expert_load": "max_expert_load_ratio",
    "straggler_share": "straggler_fraction",
    "predicted_ms": "predicted_step_ms",
    "gain_over_natural": "speedup_over_default_order",
    "save_ms": "checkpoint_save_ms",
    "save_bytes": "checkpoint_bytes",
    "save_wait_ms": "checkpoint_wait_ms",
    "upload_ms": "checkpoint_upload_ms",
    "upload_bytes": "checkpoint_upload_bytes",
    "failed_uploads": "checkpoint_upload_failures",
}
"""Maps a former metric of metrics.jsonl to the metric of this version."""
RENAMED_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "calibrate": {"--learn": "--fit-from-timeline"},
    "generate": {"--together": "--all-files", "--draw": "--generate-images"},
    "text_baseline": {"--blind": "--blank-images"},
    "draw": {"--images-per-part": "--sub-microbatch-images"},
    "async_tensor_parallel": {"--picture": "--plot"},
    "head_to_head": {"--pictures": "--plots"},
    "schedule_search": {"--picture": "--plot"},
}
"""Maps former options of a command, script or benchmark to options of this version."""
RENAMED_ADAPTER_EXPORTS: Mapping[str, str] = {"apart": "separate"}
"""Maps former values of `torchmm export --adapters` to values of this version."""


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return "KEY OLD -> NEW" for each dotted key with different values."""
    before = dict(_flat(old))
    after = dict(_flat(new))
    return [
        f"{key} {short(before.get(key, _ABSENT))} -> {short(after.get(key, _ABSENT))}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


def short(value: Any) -> str:
    """Return a value as one line of text."""
    text = value if value is _ABSENT else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def renamed_key(key: str) -> str | None:
    """Return the current name of a former key, both without indices, or None for other keys."""
    pattern = _pattern(key, RENAMED_KEYS)
    if pattern is None:
        return None
    return f"{key.rpartition('.')[0]}.{RENAMED_KEYS[pattern].rpartition('.')[2]}"


def renamed_value(key: str, value: object) -> str | None:
    """Return the current name of a former value of a key, or None for other values."""
    pattern = _pattern(key, RENAMED_VALUES)
    return RENAMED_VALUES[pattern].get(value) if pattern and isinstance(value, str) else None


def with_current_names(tables: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return tables of an earlier version with the keys and values of this version.

    Args:
        tables: Nested tables, which are not changed. Keys may be dotted.
        above: Dotted key of `tables`, with a dot at its end.
    """
    current: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{above}{name}"
        now = renamed_key(key)
        current[name if now is None else now.removeprefix(above)] = _current(value, now or key)
    return current


def _current(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return with_current_names(value, f"{key}.")
    if isinstance(value, list):
        return [_current(item, key) for item in value]
    return renamed_value(key, value) or value


def _pattern(key: str, patterns: Mapping[str, Any]) -> str | None:
    """Return the key of a mapping that matches a dotted key, with "*" for any name."""
    names = key.split(".")
    for pattern in patterns:
        parts = pattern.split(".")
        if len(parts) == len(names) and all(
            part in ("*", name) for part, name in zip(parts, names, strict=True)
        ):
            return pattern
    return None


def with_former_names(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return values with the keys of the first version of a file format.

    Args:
        values: Values by dotted keys.
        above: Section of the keys, with a dot at its end.
    """
    former = {new: old for old, new in RENAMED_KEYS.items()}
    keys = (f"{above}{name}" for name in values)
    names = (former.get(key, key).removeprefix(above) for key in keys)
    return dict(zip(names, values.values(), strict=True))


def with_current_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl with the metrics of this version."""
    return {RENAMED_METRICS.get(name, name): value for name, value in record.items()}


class _Renamed(argparse.Action):
    """Error that names the option to use."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: Any) -> None:
        parser.error(f"{unused[-1]} was renamed to {self.const}")


def reject_renamed_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Reject options of earlier versions with an error that has the new name.

    Args:
        parser: Parser that has the new options.
        command: Name in `RENAMED_OPTIONS`.
    """
    for former, now in RENAMED_OPTIONS[command].items():
        parser.add_argument(
            former, action=_Renamed, nargs="*", const=now, default=argparse.SUPPRESS,
            dest=argparse.SUPPRESS, help=argparse.SUPPRESS,
        )  # fmt: skip
