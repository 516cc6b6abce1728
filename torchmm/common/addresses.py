"""Addresses of files elsewhere: `s3://bucket/name`, `gs://`, `hf://`, `https://`.

Credentials come from the environment and never stand in an address, because addresses are written
into logs, recipes, checkpoints and trackers.
"""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_IN_TEXT = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>|]+", re.IGNORECASE)
_SECRET = re.compile(r"sig|token|credential|key|secret|password", re.IGNORECASE)
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


def is_address(path: object) -> bool:
    """Whether it is the address of something elsewhere, not a path on this machine."""
    match = _ADDRESS.match(str(path))
    return match is not None and match[1].lower() != "file"


def split_address(address: str) -> Address:
    """Its parts; what follows "?" belongs to the path."""
    scheme, _, rest = address.partition("://")
    store, _, path = rest.partition("/")
    return Address(scheme.lower(), store, path.strip("/"))


def secret_in(address: str) -> str | None:
    """What in an address is a credential, for messages, without its value; None: nothing."""
    if not is_address(address):
        return None
    parts = urlsplit(address)
    if ":" in parts.netloc.rpartition("@")[0]:
        return "user:password@"
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    return next((f"?{name}=" for name in names if _SECRET.search(name)), None)


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
    """Address of a file below a folder's; None: the name leads out of it."""
    address = split_address(folder)
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
