"""The base class of recipe sections, and the sections that extensions add."""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from torchmm.common.extensions import find_entries


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
    """Schema of additional tables with user-defined names. If None, they are rejected."""

    @property
    def describes_samples(self) -> bool:
        """True if the section describes samples, so that data and tokenizer are optional."""
        return False

    @classmethod
    def from_parent(cls, parent: Section) -> Self:
        """Return the section of this type that an extension added to `parent`.

        If the extension added its keys to the class of `parent`, return `parent`.
        """
        return next(v for v in (parent, *vars(parent).values()) if isinstance(v, cls))


S = TypeVar("S", bound=Section)


def with_extensions(section: type[S]) -> type[S]:
    """Return the section with the fields that extensions add to it (a class decorator).

    Entries of the table "sections" have names like "Recipe.float8": the extended class and the new
    key. Their targets are sections, whose docstrings describe the keys. An entry with a name like
    "MetricsConfig.*" adds the keys of its section to the class itself.
    """
    fields: dict[str, Any] = {}
    bases: list[type[Section]] = []
    for entry in find_entries("sections"):
        owner, key = entry.name.split(".")
        if owner != section.__name__:
            continue
        added = entry.load()
        if key == "*":
            bases.append(added)
        else:
            fields[key] = added, Field(default=added())
    if not fields and not bases:
        return section
    return create_model(
        section.__name__,
        # pydantic orders fields from the last base to the first
        __base__=(*bases, section),  # type: ignore[arg-type]
        __doc__=section.__doc__,
        __module__=section.__module__,
        **fields,
    )
