"""Addresses of files elsewhere: `s3://bucket/name`, `gs://`, `hf://`, `https://`.

Credentials come from the environment and never stand in an address, because addresses are written
into logs, recipes, checkpoints and trackers.
"""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

from torchmm.recipe.data_section import is_address

_IN_TEXT = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>|]+", re.IGNORECASE)
_WILD = re.compile(r"[*?[]")


class Address(NamedTuple):
    """An address in parts."""

    scheme: str
    store: str
    """A bucket, a host, or what hf:// calls a kind of repository."""
    path: str
    """Inside of it, without a slash at either end."""

    @property
    def root(self) -> str:
        """Address of the store itself."""
        return f"{self.scheme}://{self.store}"


def split_address(address: str) -> Address:
    """Its parts; what follows "?" belongs to the path."""
    scheme, _, rest = address.partition("://")
    store, _, path = rest.partition("/")
    return Address(scheme.lower(), store, path.strip("/"))


def without_secrets(text: str) -> str:
    """A text whose addresses have lost user names, passwords and everything after "?"."""
    return _IN_TEXT.sub(lambda match: _bare(match[0]), text)


def _bare(address: str) -> str:
    scheme, _, rest = address.partition("://")
    store, slash, path = rest.partition("/")
    user, at, host = store.rpartition("@")
    if ":" in user:
        store = f"...{at}{host}"
    whole = f"{store}{slash}{path}"
    bare, question, _ = whole.partition("?")
    return f"{scheme}://{bare}{'?...' if question else ''}"


def join_address(folder: str, name: str) -> str | None:
    """Address of a file below a folder's; None: the name, or address, leads out of it."""
    address = split_address(folder)
    name = name.removeprefix(posixpath.join(address.root, address.path, ""))
    path = posixpath.normpath(posixpath.join("/", address.path, name))
    inside = posixpath.join("/", address.path, "")
    if not path.startswith(inside) or path == inside or is_address(name):
        return None
    return f"{address.root}{path}"


def fixed_part(address: str) -> str:
    """The folder that everything lies in which a pattern (with "*") may match."""
    match = _WILD.search(address)
    return address if match is None else address[: match.start()].rpartition("/")[0]


def is_pattern(address: str) -> bool:
    """Whether it has wildcards."""
    return _WILD.search(address) is not None
