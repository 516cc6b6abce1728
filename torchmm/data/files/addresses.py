"""URLs of remote files: `s3://bucket/name`, `gs://`, `hf://`, `https://`.

Credentials are in the environment and never in URLs, because logs, recipes, checkpoints and
trackers contain URLs.
"""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

from torchmm.recipe.data_section import is_address

_IN_TEXT = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>|]+", re.IGNORECASE)
_WILD = re.compile(r"[*?[]")


class Address(NamedTuple):
    """Parsed URL."""

    scheme: str
    store: str
    """Bucket, host, or type of repository in hf:// URLs."""
    path: str
    """Path in the store without slashes at both ends."""

    @property
    def root(self) -> str:
        """URL of the store."""
        return f"{self.scheme}://{self.store}"


def split_address(address: str) -> Address:
    """Parse a URL. A query string is part of the path."""
    scheme, _, rest = address.partition("://")
    store, _, path = rest.partition("/")
    return Address(scheme.lower(), store, path.strip("/"))


def without_secrets(text: str) -> str:
    """Remove user names, passwords and query strings from all URLs in a text."""
    return _IN_TEXT.sub(lambda match: _bare(match[0]), text)


def _bare(address: str) -> str:
    scheme, _, rest = address.partition("://")
    store, slash, path = rest.partition("/")
    user, at, host = store.rpartition("@")
    if ":" in user:
        store = f"...{at}{host}"
    bare, question, _ = f"{store}{slash}{path}".partition("?")
    return f"{scheme}://{bare}{'?...' if question else ''}"


def join_address(folder: str, name: str) -> str | None:
    """Return the URL of a file in a directory, or None if the name is outside of it."""
    address = split_address(folder)
    name = name.removeprefix(posixpath.join(address.root, address.path, ""))
    path = posixpath.normpath(posixpath.join("/", address.path, name))
    inside = posixpath.join("/", address.path, "")
    if not path.startswith(inside) or path == inside or is_address(name):
        return None
    return f"{address.root}{path}"


def fixed_part(address: str) -> str:
    """Return the directory that contains all files that a glob pattern may match."""
    match = _WILD.search(address)
    return address if match is None else address[: match.start()].rpartition("/")[0]


def is_pattern(address: str) -> bool:
    """Return True if a URL or path has wildcards."""
    return _WILD.search(address) is not None
