"""Entries of this extension in the tables of the core."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "hooks": [
        # Rank 0 may wait for scores longer than other ranks wait for rank 0, so it comes last.
        Entry(
            "benchmarks",
            "torchmm.extensions.evaluation.benchmark_hook:BenchmarkHook",
            lambda run: run.recipe.validation.benchmarks.interval > 0,
            after="checkpoints",
        ),
    ],
}
