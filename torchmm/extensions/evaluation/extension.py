"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.common.extensions import Entries, Entry
from torchmm.extensions.evaluation.section import BenchmarksConfig


def _generates_samples(run: Any) -> bool:
    validation = run.recipe.validation
    return validation.interval > 0 and (
        validation.num_samples > 0 or validation.generated_images > 0
    )


def _has_benchmarks(run: Any) -> bool:
    return BenchmarksConfig.from_parent(run.recipe.validation).interval > 0


ENTRIES: Entries = {
    "sections": [
        Entry("ValidationConfig.*", "torchmm.extensions.evaluation.section:EvaluationKeys")
    ],
    "recipe_checks": [Entry("evaluation", "torchmm.extensions.evaluation.checks:check_benchmarks")],
    "hooks": [
        Entry(
            "generated_samples",
            "torchmm.extensions.evaluation.sample_hook:SampleHook",
            _generates_samples,
            after="validation",
        ),
        # Rank 0 may wait for scores longer than other ranks wait for rank 0, so it is last.
        Entry(
            "benchmarks",
            "torchmm.extensions.evaluation.benchmark_hook:BenchmarkHook",
            _has_benchmarks,
            after="checkpoints",
        ),
    ],
}
