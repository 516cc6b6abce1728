"""Entries of this extension in the tables of the core."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "file_systems": [
        Entry("addresses", "torchmm.extensions.remote.storage.remote_files:open_storage"),
    ],
    "sample_services": [
        Entry("producers", "torchmm.extensions.remote.producers.service:Producers"),
    ],
}
