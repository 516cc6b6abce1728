"""Asks object stores for sizes, lists and ranges of bytes; asks again when they do not answer.

    client = StoreClient("s3://bucket", retry_timeout_s=180)
    found = client.stat("shards/0.tar")
    client.read("shards/0.tar", 0, 512, found.version)
    client.write("runs/a/MANIFEST.json", b"{}")        # checkpoints; data are never written

Buckets (`s3://`, `gs://`, `az://`) and plain web servers (`https://`) are read through obstore,
everything else through fsspec, which Hugging Face brings along for `hf://`. Both could be one
library. Not fsspec: s3fs fixes the version of fsspec and, through aiobotocore, that of botocore
(datasets fixes the first too), its event loop does not survive a fork, and it cannot ask for a
range of exactly one version. Not obstore alone: it does not know hf://. obstore is one wheel
without dependencies, and asks with If-Match: bytes of an object that was replaced meanwhile are
never mixed with those of the old one.

Repeating is done here for both: waits double from 0.1 s to 8 s, shortened by chance so that a
thousand ranks do not return at once, until `retry_timeout_s` have passed. Credentials are read from
the environment by the libraries themselves; nothing here ever holds one.
"""

from __future__ import annotations

import errno
import logging
import os
import posixpath
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec

from torchmm.common.errors import ConfigError, DataError, install_command
from torchmm.common.files import replace_atomically, sync_directory
from torchmm.data.files.addresses import split_address, without_secrets

BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "http", "https")
"""Schemes that obstore reads."""
LOCAL = ("file", "local", "dir", "blockcache", "filecache", "simplecache", "cached", "reference")
"""Schemes of fsspec that name files of this machine in another way."""
THIS_MACHINE = "file://"
"""Root of paths of this machine where any address will do; sources have other ways to read them."""
SOURCES_KEY = "`path` in [[data.sources]]"
CONNECT_S, SILENCE_S = 5.0, 30.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 8.0
PART_BYTES = 16 << 20
MOST_PARTS = 9000
"""Of large objects that are written: stores take no more than 10,000 parts."""
_NO_PLACE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d|status: 4(?!08|29)\d\d")
_DENIED = re.compile(r"status(?: code)?: 40[13]\b")
_NO_CREDENTIALS = re.compile(
    r"/latest/api/token|/latest/meta-data|computeMetadata|metadata\.google|redential", re.IGNORECASE
)
_REMEDIES = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_REGION) in the environment, or "
    "AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS in the environment, or GOOGLE_SKIP_SIGNATURE=true "
    "for a public bucket",
    "hf": "set HF_TOKEN in the environment",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY in the environment",
}
_SAME_AS = {"s3a": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az"}

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Found(NamedTuple):
    """What a store says of an object."""

    path: str
    size: int
    version: str
    """Changes with its content: ETag, commit, or the time of its last change."""


class MissingError(FileNotFoundError):
    """There is no such object."""


class ReplacedError(DataError):
    """An object is not the one any more that it was when the source was opened."""


class StoreClient:
    """Asks one store (a bucket, a host). Not shared between processes.

    Args:
        root: its address, or `THIS_MACHINE`.
        retry_timeout_s: seconds after which a request that still fails ends the run.
        key: what in a recipe has named it, for messages.

    Raises:
        ConfigError: the library that reads it is not installed.
    """

    def __init__(self, root: str, retry_timeout_s: float, key: str = SOURCES_KEY) -> None:
        self._root = root
        self._give_up_s = retry_timeout_s
        self._key = key
        self._scheme = split_address(root).scheme
        self._store: _ObjectStore | _Filesystem
        if self._scheme in BUCKETS:
            self._store = _ObjectStore(root, retry_timeout_s)
        else:
            self._store = _Filesystem(root)
        self._random = random.Random()
        self.bytes_read = 0
        """Received so far."""

    def stat(self, path: str) -> Found:
        """Size and version of an object.

        Raises:
            MissingError: there is none.
            DataError: the store refuses, or does not answer.
        """
        return self._repeat(path, lambda: self._store.stat(path))

    def list(self, path: str) -> list[Found]:
        """All objects below a folder, by name; raises DataError."""
        try:
            found = self._repeat(path, lambda: list(self._store.list(path)))
        except MissingError:
            return []
        return sorted(found)

    def read(self, path: str, start: int, end: int, version: str) -> bytes:
        """Bytes [start, end) of an object of this version.

        Raises:
            MissingError: it is gone.
            ReplacedError: it has another version now.
            DataError: the store refuses, or does not answer.
        """

        def read() -> bytes:
            data = self._store.read(path, start, end, version)
            if len(data) != end - start:
                raise ConnectionError(f"received {len(data)} bytes instead of {end - start}")
            return data

        if start == end:  # stores reject such a request
            return b""
        data = self._repeat(path, read)
        self.bytes_read += len(data)
        return data

    def write(self, path: str, content: bytes | Path) -> None:
        """Write bytes or a local file to an object, replacing the object of this name.

        Objects of buckets and of local directories appear complete or not at all. Other file
        systems that fsspec opens may keep an incomplete object if the write fails.

        Raises:
            DataError: The store rejects the object, is full, or does not respond.
            OSError: The file cannot be read.
        """
        if isinstance(content, Path):
            content.stat()
        self._repeat(path, lambda: self._store.write(path, content))

    def remove(self, path: str) -> None:
        """Removes an object, if there is one; raises DataError."""
        with suppress(MissingError):
            self._repeat(path, lambda: self._store.remove(path))

    def _repeat(self, path: str, request: Callable[[], T]) -> T:
        """The answer to a request that is made until it succeeds, or it is known that it cannot."""
        began = time.monotonic()
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return request()
            except (DataError, ConfigError):
                raise
            except Exception as error:  # those of any library; raised again when time is up
                self._raise_if_final(path, error)
                waited_s = time.monotonic() - began
                if waited_s >= self._give_up_s:
                    raise DataError(
                        f"{self._name(path)} did not respond for {waited_s:.0f} s "
                        f"({_brief(error)}); check that the object store is reachable, or "
                        "raise data.storage.retry_timeout_s"
                    ) from error
                if wait_s == FIRST_WAIT_S:
                    logger.warning(
                        "%s: %s; retrying for up to %.0f s",
                        self._name(path),
                        _brief(error),
                        self._give_up_s,
                    )
            time.sleep(min(self._random.uniform(wait_s / 2, wait_s), self._give_up_s))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _raise_if_final(self, path: str, error: Exception) -> None:
        """Raises what no repeating mends."""
        name = self._name(path)
        kind = type(error).__name__
        text = str(error)
        if "NoSuchBucket" in text:
            raise DataError(f"{name}: no such bucket; correct {self._key}") from None
        if isinstance(error, OSError) and error.errno in _NO_PLACE:
            raise DataError(f"{name}: {error.strerror}") from None
        if isinstance(error, FileNotFoundError) or kind.endswith("NotFoundError"):
            raise MissingError(f"{name}: no such object (or bucket)") from None
        if kind == "PreconditionError":
            raise ReplacedError(
                f"{name} was replaced while it was being read; start again to index it again"
            ) from None
        denied = kind in ("PermissionDeniedError", "UnauthenticatedError", "GatedRepoError")
        denied = denied or isinstance(error, PermissionError) or _DENIED.search(text) is not None
        if denied or _NO_CREDENTIALS.search(text):
            remedy = _REMEDIES.get(
                _SAME_AS.get(self._scheme, self._scheme), "see its documentation"
            )
            raise DataError(
                f"{name}: access denied, or no credentials found ({_brief(error)}); {remedy}"
            ) from None
        if _REFUSED.search(text) or kind in ("InvalidPathError", "NotSupportedError"):
            raise DataError(
                f"{name}: the object store rejects the request: {_brief(error)}"
            ) from None

    def _name(self, path: str) -> str:
        return without_secrets(f"{self._root}/{path}")


class _ObjectStore:
    """A bucket, through obstore."""

    def __init__(self, root: str, retry_timeout_s: float) -> None:
        try:
            import obstore  # noqa: PLC0415 - an extra
            import obstore.store  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(f"{root}: requires obstore; {install_command('storage')}") from error
        self._obstore: Any = obstore
        # Encryption may only be left out where the user's own address of the server says so.
        endpoints = (os.environ.get(f"AWS_ENDPOINT_URL{end}", "") for end in ("", "_S3"))
        plain = root.startswith("http://") or any(e.startswith("http://") for e in endpoints)
        self._store: Any = obstore.store.from_url(
            root,
            client_options={
                "connect_timeout": timedelta(seconds=min(CONNECT_S, retry_timeout_s)),
                "read_timeout": timedelta(seconds=min(SILENCE_S, retry_timeout_s)),
                "timeout": timedelta(seconds=max(retry_timeout_s, SILENCE_S)),
                **({"allow_http": True} if plain else {}),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=retry_timeout_s)},
        )

    def stat(self, path: str) -> Found:
        return _of_object(self._obstore.head(self._store, path))

    def list(self, path: str) -> Iterator[Found]:
        for chunk in self._obstore.list(self._store, path or None, chunk_size=1000):
            yield from map(_of_object, chunk)

    def read(self, path: str, start: int, end: int, version: str) -> bytes:
        options: dict[str, Any] = {"range": (start, end)}
        if version.endswith('"'):  # an ETag, not a time
            options["if_match"] = version
        answer = self._obstore.get(self._store, path, options=options)
        return bytes(answer.bytes())

    def write(self, path: str, content: bytes | Path) -> None:
        size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        part_bytes = max(PART_BYTES, size_bytes // MOST_PARTS)
        self._obstore.put(self._store, path, content, chunk_size=part_bytes)

    def remove(self, path: str) -> None:
        self._obstore.delete(self._store, path)


def _of_object(meta: Any) -> Found:
    etag = meta["e_tag"]
    # Weak ones ("W/...") match nothing.
    version = etag if etag and not etag.startswith("W/") else meta["last_modified"].isoformat()
    return Found(meta["path"], meta["size"], version)


class _Filesystem:
    """Anything else that fsspec opens."""

    def __init__(self, root: str) -> None:
        address = split_address(root)
        if (address.scheme in LOCAL and root != THIS_MACHINE) or "::" in root:
            raise ConfigError(f"{root}: use plain paths for local files")
        try:
            self._files: Any = fsspec.filesystem(address.scheme, skip_instance_cache=True)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"{root}: fsspec cannot open {address.scheme}:// ({error})"
            ) from error
        self._prefix = f"{address.store}/"
        self._is_local = root == THIS_MACHINE

    def stat(self, path: str) -> Found:
        info = self._files.info(self._prefix + path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return self._found(info)

    def list(self, path: str) -> Iterator[Found]:
        self._files.invalidate_cache()  # other processes may have written meanwhile
        found = self._files.find(self._prefix + path, detail=True)
        return map(self._found, found.values())

    def read(self, path: str, start: int, end: int, version: str) -> bytes:
        with self._files.open(self._prefix + path, "rb", cache_type="none") as stream:
            stream.seek(start)
            data: bytes = stream.read(end - start)
        return data

    def write(self, path: str, content: bytes | Path) -> None:
        place = self._prefix + path
        self._files.makedirs(posixpath.dirname(place), exist_ok=True)
        if self._is_local:
            replace_atomically(Path(place), content)
            sync_directory(Path(place).parent)
        elif isinstance(content, bytes):
            self._files.pipe_file(place, content)
        else:
            self._files.put_file(str(content), place)

    def remove(self, path: str) -> None:
        self._files.rm_file(self._prefix + path)

    def _found(self, info: dict[str, Any]) -> Found:
        keys = ("ETag", "etag", "sha256", "blob_id", "mtime", "last_modified", "created")
        version = next((str(info[key]) for key in keys if info.get(key)), "")
        name = str(info["name"]).lstrip("/")
        return Found(name.removeprefix(self._prefix), int(info["size"] or 0), version)


def _brief(error: Exception) -> str:
    """The first line of a library's error, without anything secret."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {without_secrets(lines[0])[:300]}"
