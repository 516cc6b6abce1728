"""Entries of this extension in the tables of the core."""

from torchmm.common.extensions import Entries, Entry

ENTRIES: Entries = {
    "model_fallbacks": [
        Entry("llm", "torchmm.extensions.auto_models.parity:register_llm"),
        Entry("encoder", "torchmm.extensions.auto_models.parity:register_encoder"),
    ],
}
