"""Clients of remote storage: sizes, lists and byte ranges of objects, with retries.

    client = StoreClient("s3://bucket", retry_timeout_s=180)
    found = client.stat("shards/0.tar")
    client.read("shards/0.tar", 0, 512, found.version)
    client.write("runs/a/MANIFEST.json", b"{}")        # checkpoints; data are never written

Buckets (`s3://`, `gs://`, `az://`) and web servers (`https://`) are read through obstore, all other
URLs through fsspec, which is a dependency of Hugging Face for `hf://`. One library is not
sufficient. s3fs pins the version of fsspec and, through aiobotocore, that of botocore. datasets
pins the version of fsspec as well. The event loop of s3fs does not survive a fork, and it cannot
request a range of exactly one version. obstore does not support hf://. obstore is one wheel without
dependencies and uses If-Match, so that bytes of different versions of an object are never mixed.

This module implements retries for both libraries. Waits double from 0.1 s to 8 s with random
jitter, so that a thousand ranks do not retry at the same time, until `retry_timeout_s` has passed.
The libraries read credentials from the environment, and this module never stores them.
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
from torchmm.data.files.urls import parse_url, redact_urls

OBSTORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "http", "https")
"""URL schemes that obstore reads."""
LOCAL_SCHEMES = (
    "file",
    "local",
    "dir",
    "blockcache",
    "filecache",
    "simplecache",
    "cached",
    "reference",
)
"""URL schemes of fsspec for local files."""
LOCAL_ROOT = "file://"
"""Root of local paths, for uses in which any URL is accepted."""
SOURCE_PATH_KEY = "`path` in [[data.sources]]"
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 30.0
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 8.0
PART_BYTES = 16 << 20
MAX_PARTS = 9000
"""Maximum number of parts of written objects. Object stores accept at most 10,000 parts."""
_PERMANENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
_REJECTED = re.compile(r"status code: 4(?!08|29)\d\d|status: 4(?!08|29)\d\d")
_DENIED = re.compile(r"status(?: code)?: 40[13]\b")
_NO_CREDENTIALS = re.compile(
    r"/latest/api/token|/latest/meta-data|computeMetadata|metadata\.google|redential", re.IGNORECASE
)
_CREDENTIAL_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_REGION) in the environment, or "
    "AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS in the environment, or GOOGLE_SKIP_SIGNATURE=true "
    "for a public bucket",
    "hf": "set HF_TOKEN in the environment",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY in the environment",
}
_SCHEME_ALIASES = {"s3a": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az"}

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ObjectInfo(NamedTuple):
    """Metadata of an object in remote storage."""

    path: str
    size: int
    version: str
    """Version of the content: ETag, commit, or time of the last modification."""


class MissingError(FileNotFoundError):
    """Error of an object that does not exist."""


class ReplacedError(DataError):
    """Error of an object that was replaced after the source was opened."""


class StoreClient:
    """Client of one remote storage (a bucket, a host). Not shared between processes.

    Args:
        root: Root URL, or `LOCAL_ROOT`.
        retry_timeout_s: Time in seconds after which a failing request stops the run.
        key: Recipe key of the URL, for error messages.

    Raises:
        ConfigError: The library that reads the URL is not installed.
    """

    def __init__(self, root: str, retry_timeout_s: float, key: str = SOURCE_PATH_KEY) -> None:
        self._root = root
        self._retry_timeout_s = retry_timeout_s
        self._key = key
        self._scheme = parse_url(root).scheme
        self._store: _ObjectStore | _Filesystem
        if self._scheme in OBSTORE_SCHEMES:
            self._store = _ObjectStore(root, retry_timeout_s)
        else:
            self._store = _Filesystem(root)
        self._random = random.Random()
        self.bytes_read = 0
        """Number of bytes received so far."""

    def stat(self, path: str) -> ObjectInfo:
        """Return size and version of an object.

        Raises:
            MissingError: The object does not exist.
            DataError: The remote storage rejects the request or does not respond.
        """
        return self._repeat(path, lambda: self._store.stat(path))

    def list(self, path: str) -> list[ObjectInfo]:
        """Return all objects below a folder, sorted by name. May raise DataError."""
        try:
            objects = self._repeat(path, lambda: list(self._store.list(path)))
        except MissingError:
            return []
        return sorted(objects)

    def read(self, path: str, start: int, end: int, version: str) -> bytes:
        """Return the bytes [start, end) of an object of this version.

        Raises:
            MissingError: The object does not exist any more.
            ReplacedError: The object has a different version.
            DataError: The remote storage rejects the request or does not respond.
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

        Objects of buckets and of local directories are complete or do not appear. Other file
        systems that fsspec opens may retain an incomplete object if the write fails.

        Raises:
            DataError: The remote storage rejects the object, is full, or does not respond.
            OSError: The file cannot be read.
        """
        if isinstance(content, Path):
            content.stat()
        self._repeat(path, lambda: self._store.write(path, content))

    def remove(self, path: str) -> None:
        """Remove an object if it exists. May raise DataError."""
        with suppress(MissingError):
            self._repeat(path, lambda: self._store.remove(path))

    def _repeat(self, path: str, request: Callable[[], T]) -> T:
        """Repeat a request until it succeeds or fails permanently, and return its response."""
        began = time.monotonic()
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return request()
            except (DataError, ConfigError):
                raise
            except Exception as error:  # any error of the libraries; raised again at the time limit
                self._raise_if_final(path, error)
                waited_s = time.monotonic() - began
                if waited_s >= self._retry_timeout_s:
                    raise DataError(
                        f"{self._name(path)} did not respond for {waited_s:.0f} s "
                        f"({_summarize_error(error)}); check that the object store is reachable, "
                        "or "
                        "raise data.storage.retry_timeout_s"
                    ) from error
                if wait_s == FIRST_WAIT_S:
                    logger.warning(
                        "%s: %s; retrying for up to %.0f s",
                        self._name(path),
                        _summarize_error(error),
                        self._retry_timeout_s,
                    )
            time.sleep(min(self._random.uniform(wait_s / 2, wait_s), self._retry_timeout_s))
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _raise_if_final(self, path: str, error: Exception) -> None:
        """Raise errors that a retry cannot fix."""
        name = self._name(path)
        kind = type(error).__name__
        text = str(error)
        if "NoSuchBucket" in text:
            raise DataError(f"{name}: no such bucket; correct {self._key}") from None
        if isinstance(error, OSError) and error.errno in _PERMANENT_ERRNOS:
            raise DataError(f"{name}: {error.strerror}") from None
        if isinstance(error, FileNotFoundError) or kind.endswith("NotFoundError"):
            raise MissingError(f"{name}: no such object (or bucket)") from None
        if kind == "PreconditionError":
            raise ReplacedError(
                f"{name} was replaced while it was being read; start again to index it again"
            ) from None
        is_denied = kind in ("PermissionDeniedError", "UnauthenticatedError", "GatedRepoError")
        is_denied = (
            is_denied or isinstance(error, PermissionError) or _DENIED.search(text) is not None
        )
        if is_denied or _NO_CREDENTIALS.search(text):
            hint = _CREDENTIAL_HINTS.get(
                _SCHEME_ALIASES.get(self._scheme, self._scheme), "see its documentation"
            )
            raise DataError(
                f"{name}: access denied, or no credentials found ({_summarize_error(error)}); "
                f"{hint}"
            ) from None
        if _REJECTED.search(text) or kind in ("InvalidPathError", "NotSupportedError"):
            raise DataError(
                f"{name}: the object store rejects the request: {_summarize_error(error)}"
            ) from None

    def _name(self, path: str) -> str:
        return redact_urls(f"{self._root}/{path}")


class _ObjectStore:
    """Bucket that is accessed through obstore."""

    def __init__(self, root: str, retry_timeout_s: float) -> None:
        try:
            import obstore  # noqa: PLC0415 - an extra
            import obstore.store  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(f"{root}: requires obstore; {install_command('storage')}") from error
        self._obstore: Any = obstore
        # Connections are unencrypted only if the user sets an http:// endpoint.
        endpoints = (os.environ.get(f"AWS_ENDPOINT_URL{end}", "") for end in ("", "_S3"))
        allow_http = root.startswith("http://") or any(e.startswith("http://") for e in endpoints)
        self._store: Any = obstore.store.from_url(
            root,
            client_options={
                "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, retry_timeout_s)),
                "read_timeout": timedelta(seconds=min(READ_TIMEOUT_S, retry_timeout_s)),
                "timeout": timedelta(seconds=max(retry_timeout_s, READ_TIMEOUT_S)),
                **({"allow_http": True} if allow_http else {}),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=retry_timeout_s)},
        )

    def stat(self, path: str) -> ObjectInfo:
        return _object_info(self._obstore.head(self._store, path))

    def list(self, path: str) -> Iterator[ObjectInfo]:
        for chunk in self._obstore.list(self._store, path or None, chunk_size=1000):
            yield from map(_object_info, chunk)

    def read(self, path: str, start: int, end: int, version: str) -> bytes:
        options: dict[str, Any] = {"range": (start, end)}
        if version.endswith('"'):  # an ETag, not a time
            options["if_match"] = version
        response = self._obstore.get(self._store, path, options=options)
        return bytes(response.bytes())

    def write(self, path: str, content: bytes | Path) -> None:
        size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        part_bytes = max(PART_BYTES, size_bytes // MAX_PARTS)
        self._obstore.put(self._store, path, content, chunk_size=part_bytes)

    def remove(self, path: str) -> None:
        self._obstore.delete(self._store, path)


def _object_info(meta: Any) -> ObjectInfo:
    etag = meta["e_tag"]
    # Weak ETags ("W/...") never match.
    version = etag if etag and not etag.startswith("W/") else meta["last_modified"].isoformat()
    return ObjectInfo(meta["path"], meta["size"], version)


class _Filesystem:
    """Other URLs, which are accessed through fsspec."""

    def __init__(self, root: str) -> None:
        url = parse_url(root)
        if (url.scheme in LOCAL_SCHEMES and root != LOCAL_ROOT) or "::" in root:
            raise ConfigError(f"{root}: use plain paths for local files")
        try:
            self._files: Any = fsspec.filesystem(url.scheme, skip_instance_cache=True)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{root}: fsspec cannot open {url.scheme}:// ({error})") from error
        self._prefix = f"{url.bucket}/"
        self._is_local = root == LOCAL_ROOT

    def stat(self, path: str) -> ObjectInfo:
        info = self._files.info(self._prefix + path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return self._object_info_of(info)

    def list(self, path: str) -> Iterator[ObjectInfo]:
        self._files.invalidate_cache()  # other processes may have written files
        entries = self._files.find(self._prefix + path, detail=True)
        return map(self._object_info_of, entries.values())

    def read(self, path: str, start: int, end: int, version: str) -> bytes:
        with self._files.open(self._prefix + path, "rb", cache_type="none") as stream:
            stream.seek(start)
            data: bytes = stream.read(end - start)
        return data

    def write(self, path: str, content: bytes | Path) -> None:
        target = self._prefix + path
        self._files.makedirs(posixpath.dirname(target), exist_ok=True)
        if self._is_local:
            replace_atomically(Path(target), content)
            sync_directory(Path(target).parent)
        elif isinstance(content, bytes):
            self._files.pipe_file(target, content)
        else:
            self._files.put_file(str(content), target)

    def remove(self, path: str) -> None:
        self._files.rm_file(self._prefix + path)

    def _object_info_of(self, info: dict[str, Any]) -> ObjectInfo:
        keys = ("ETag", "etag", "sha256", "blob_id", "mtime", "last_modified", "created")
        version = next((str(info[key]) for key in keys if info.get(key)), "")
        name = str(info["name"]).lstrip("/")
        return ObjectInfo(name.removeprefix(self._prefix), int(info["size"] or 0), version)


def _summarize_error(error: Exception) -> str:
    """Return the first line of a library error, without credentials."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {redact_urls(lines[0])[:300]}"
