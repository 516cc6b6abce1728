"""Entries of this extension in the tables of the core."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "file_systems": [
        Entry(
            "addresses", "torchmm.extensions.remote.storage.remote_files:open_remote_file_system"
        ),
    ],
    "checkpoint_stores": [
        Entry(
            "addresses", "torchmm.extensions.remote.checkpoints.checkpoint_store:StoredCheckpoints"
        ),
    ],
    "recipe_checks": [Entry("remote", "torchmm.extensions.remote.checks:find_problems")],
    "sections": [Entry("DataConfig.storage", "torchmm.extensions.remote.section:StorageConfig")],
    "sample_services": [
        Entry("producers", "torchmm.extensions.remote.producers.service:ProducerService"),
    ],
}
