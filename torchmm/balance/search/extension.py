"""Extension entries of the search for open recipe values."""

from torchmm.common.extensions import Entries, Entry

_MODULE = "torchmm.balance.search.recipe_completion"

ENTRIES: Entries = {
    "recipe_choices": [
        Entry("sizes", f"{_MODULE}:complete_sizes"),
        Entry("arrangement", f"{_MODULE}:complete_reordering"),
        Entry(
            "segments",
            f"{_MODULE}:complete_segments",
            lambda parallel: parallel.schedule == "searched" and parallel.pipeline > 1,
        ),
    ],
}
