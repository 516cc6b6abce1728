"""Tar shards that lost their tail are noticed: readers of tars stop there without a word.

A whole archive ends in two blocks of zeros, which is looked at on every start: one small read per
shard. Only where they are missing are the headers of that shard read, to tell what was lost.
Rejected: reading all headers always, which on each start costs as many small reads as there are
samples. Compressed archives end in marks of their own, which their readers check.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Sequence
from pathlib import Path

from torchmm.errors import DataError

END_MARK = bytes(2 * tarfile.BLOCKSIZE)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ")
_REMEDY = "fetch or write it again, or take it out of the source"

logger = logging.getLogger(__name__)


def check_tars(files: Sequence[Path]) -> None:
    """Looks at the ends of tar files.

    Raises:
        DataError: one is cut off inside of a member, or is no tar file.
    """
    for file in files:
        try:
            if not _ends_well(file):
                _explain(file)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error


def _ends_well(file: Path) -> bool:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(8).startswith(_COMPRESSED):
            return True
        stream.seek(max(0, size - len(END_MARK)))
        return size % tarfile.BLOCKSIZE == 0 and stream.read() == END_MARK


def _explain(file: Path) -> None:
    """Raises or warns, going by where the members of an archive without an end mark end."""
    size, last = file.stat().st_size, ""
    try:
        with tarfile.open(file, "r:") as tar:
            while (member := tar.next()) is not None:
                if member.offset_data + member.size > size:
                    raise DataError(
                        f"{file} is cut off after {size} bytes, inside of its member "
                        f"{member.name}; {_REMEDY}"
                    )
                last = member.name
            end = tar.offset
    except tarfile.TarError as error:
        behind = f"cut off after {size} bytes, behind {last}" if last else "not a whole tar file"
        raise DataError(f"{file} is {behind} ({error}); {_REMEDY}") from error
    with file.open("rb") as stream:
        stream.seek(end - end % tarfile.BLOCKSIZE)
        rest = stream.read(tarfile.BLOCKSIZE)
    if rest.strip(b"\0"):
        raise DataError(f"{file} is cut off after {size} bytes, behind {last}; {_REMEDY}")
    logger.warning(
        "%s has no end-of-archive mark: if it was cut off between two members, the samples behind "
        "%s are missing. Compare its size with the original's",
        file,
        last or "its beginning",
    )
