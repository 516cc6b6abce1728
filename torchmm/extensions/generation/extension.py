"""Entries of this extension in the tables of the core."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "generators": [
        Entry("module", "torchmm.extensions.generation.families.build:build_generator"),
        Entry("images", "torchmm.extensions.generation.images:DiffusionImages"),
    ],
    "recipe_checks": [Entry("generator", "torchmm.extensions.generation.checks:check_generator")],
}
