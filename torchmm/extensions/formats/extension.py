"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.common.extensions import Entries, Entry


def _may_be_energon(source: Any) -> bool:
    return source.format in ("auto", "energon")


def _is_lance(source: Any) -> bool:
    named = source.path.rstrip("/").endswith(".lance")
    return source.format == "lance" or (source.format == "auto" and named)


ENTRIES: Entries = {
    "source_formats": [
        Entry("lance", "torchmm.extensions.formats.lance_tables:LanceFormat", _is_lance),
        Entry("energon", "torchmm.extensions.formats.energon:EnergonFormat", _may_be_energon),
    ],
}
