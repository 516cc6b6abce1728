"""Extension entries of the search for open recipe values."""

from torchmm.common.extensions import Entries, Entry

_MODULE = "torchmm.balance.search.placement"

ENTRIES: Entries = {
    "recipe_choices": [
        Entry("sizes", f"{_MODULE}:orchestrated"),
        Entry("arrangement", f"{_MODULE}:with_arrangement"),
        Entry(
            "segments",
            f"{_MODULE}:with_run_segments",
            lambda parallel: parallel.schedule == "searched" and parallel.pipeline > 1,
        ),
    ],
}
