"""Opening files that data name: regular ones alone, and without ever waiting for one.

A record may name a pipe, which would block until somebody writes into it; a device, which never
ends; a directory. A file that was measured may be any of these when it is its turn.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from torchmm.data.storage.remote_files import RemoteFile

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path | RemoteFile | str) -> BinaryIO:
    """Opens a file for reading, wherever it lies.

    Raises:
        OSError: there is none, or it is no regular file.
        ValueError: no file can have this name.
    """
    if isinstance(path, RemoteFile):
        return path.open()
    return open(path, "rb", opener=_descriptor)


def _descriptor(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | os.O_NONBLOCK)  # which says nothing of regular files
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"is {_KINDS.get(kind, 'something else')}, not a file", name)
    return descriptor
