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
    bucket: str
    """Bucket, host, or type of repository in hf:// URLs."""
    path: str
    """Path in the store without slashes at both ends."""

    @property
    def root(self) -> str:
        """URL of the store."""
        return f"{self.scheme}://{self.bucket}"


def parse_url(url: str) -> ParsedUrl:
    """Parse a URL. A query string is part of the path."""
    scheme, _, rest = url.partition("://")
    store, _, path = rest.partition("/")
    return ParsedUrl(scheme.lower(), store, path.strip("/"))


def redact_urls(text: str) -> str:
    """Remove user names, passwords and query strings from all URLs in a text."""
    return _URL.sub(lambda match: _redact_url(match[0]), text)


def _redact_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    store, slash, path = rest.partition("/")
    user, at, host = store.rpartition("@")
    if ":" in user:
        store = f"...{at}{host}"
    bare, question, _ = f"{store}{slash}{path}".partition("?")
    return f"{scheme}://{bare}{'?...' if question else ''}"


def join_url(folder: str, name: str) -> str | None:
    """Return the URL of a file in a directory, or None if the name is outside of it."""
    url = parse_url(folder)
    name = name.removeprefix(posixpath.join(url.root, url.path, ""))
    path = posixpath.normpath(posixpath.join("/", url.path, name))
    inside = posixpath.join("/", url.path, "")
    if not path.startswith(inside) or path == inside or is_address(name):
        return None
    return f"{url.root}{path}"


def glob_directory(url: str) -> str:
    """Return the directory that contains all files that a glob pattern may match."""
    match = _WILDCARD.search(url)
    return url if match is None else url[: match.start()].rpartition("/")[0]


def is_glob(url: str) -> bool:
    """Return True if a URL or path has wildcards."""
    return _WILDCARD.search(url) is not None
