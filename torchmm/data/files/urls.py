"""URLs of remote files: `s3://bucket/name`, `gs://`, `hf://`, `https://`.

Credentials are in the environment and never in URLs, because logs, recipes, checkpoints and
trackers contain URLs.
"""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple

from torchmm.recipe.data_section import is_address

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>|]+", re.IGNORECASE)
_WILDCARD = re.compile(r"[*?[]")


class ParsedUrl(NamedTuple):
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


def parse_url(address: str) -> ParsedUrl:
    """Parse a URL. A query string is part of the path."""
    scheme, _, rest = address.partition("://")
    store, _, path = rest.partition("/")
    return ParsedUrl(scheme.lower(), store, path.strip("/"))


def redact_urls(text: str) -> str:
    """Remove user names, passwords and query strings from all URLs in a text."""
    return _URL.sub(lambda match: _redact_url(match[0]), text)


def _redact_url(address: str) -> str:
    scheme, _, rest = address.partition("://")
    store, slash, path = rest.partition("/")
    user, at, host = store.rpartition("@")
    if ":" in user:
        store = f"...{at}{host}"
    bare, question, _ = f"{store}{slash}{path}".partition("?")
    return f"{scheme}://{bare}{'?...' if question else ''}"


def join_url(folder: str, name: str) -> str | None:
    """Return the URL of a file in a directory, or None if the name is outside of it."""
    address = parse_url(folder)
    name = name.removeprefix(posixpath.join(address.root, address.path, ""))
    path = posixpath.normpath(posixpath.join("/", address.path, name))
    inside = posixpath.join("/", address.path, "")
    if not path.startswith(inside) or path == inside or is_address(name):
        return None
    return f"{address.root}{path}"


def glob_directory(address: str) -> str:
    """Return the directory that contains all files that a glob pattern may match."""
    match = _WILDCARD.search(address)
    return address if match is None else address[: match.start()].rpartition("/")[0]


def is_glob(address: str) -> bool:
    """Return True if a URL or path has wildcards."""
    return _WILDCARD.search(address) is not None
