"""What every section of a recipe has in common: strict, frozen, sometimes with tables named
freely.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all recipe sections: strict types, finite numbers, no unknown keys, no mutation."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
    named_tables: ClassVar[type[Section] | None] = None
    """Schema of freely named tables in addition to the section's own keys; None: there are none."""
