"""Skip marks for tests whose recipes need an extension that may be missing."""

from __future__ import annotations

import pytest

from torchmm.common.extensions import extension_names


def needs_extension(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if an extension ("balance", "extensions.NAME") is missing."""
    missing = f"torchmm.{name}" not in extension_names()
    return pytest.mark.skipif(missing, reason=f"the extension {name} is not installed")
