"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.common.extensions import Entries, Entry


def _is_used(parallel: Any) -> bool:
    return bool(parallel.async_tensor_parallel)


ENTRIES: Entries = {
    "recipe_checks": [
        Entry("async_tensor_parallel", "torchmm.extensions.async_tp.checks:check_async_tensor"),
    ],
    "parallel_styles": [
        Entry(
            "async_tensor_parallel",
            "torchmm.extensions.async_tp.selection:choose_styles",
            _is_used,
        ),
    ],
}
