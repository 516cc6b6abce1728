"""Notices tar shards that lost their tail, where readers of tars silently stop.

A whole archive ends in two blocks of zeros, which are checked on every start: one small read per
shard. Only if they are missing are the headers of that shard read, to say what was lost.
Rejected: always reading all headers, which on each start costs as many small reads as there are
samples. Compressed archives are refused: members would have to be unpacked to be reached.
"""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Sequence

from torchmm.common.errors import DataError
from torchmm.data.corrupt import first_of
from torchmm.data.files.remote import AnyFile
from torchmm.data.files.sample_files import open_regular

END_MARK = bytes(2 * tarfile.BLOCKSIZE)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_REMEDY = "fetch or write it again, or take it out of the source"

logger = logging.getLogger(__name__)


def check_tars(files: Sequence[AnyFile]) -> None:
    """Looks at the ends of tar files.

    Raises:
        DataError: some are cut off inside a member, compressed, or no tar files: all are named.
    """
    refused = []
    for file in files:
        try:
            if not _ends_well(file):
                _explain(file)
        except OSError as error:
            refused.append(f"{file}: {error.strerror}")
        except DataError as error:
            refused.append(str(error))
    if refused:
        raise DataError(refused[0] if len(refused) == 1 else f"tar files:{first_of(refused)}")


def _ends_well(file: AnyFile) -> bool:
    size = file.stat().st_size
    with open_regular(file) as stream:
        if stream.read(8).startswith(_COMPRESSED):
            raise DataError(f"{file} is compressed; unpack it, or take it out of the source")
        stream.seek(max(0, size - len(END_MARK)))
        return size % tarfile.BLOCKSIZE == 0 and stream.read() == END_MARK


def _explain(file: AnyFile) -> None:
    """Raises or warns, depending on where the members of an archive without an end mark end."""
    size = file.stat().st_size
    last = ""
    try:
        with open_regular(file) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            while (member := tar.next()) is not None:
                if member.offset_data + member.size > size:
                    raise DataError(
                        f"{file} is cut off after {size} bytes, inside its member "
                        f"{member.name}; {_REMEDY}"
                    )
                last = member.name
            end = tar.offset
    except tarfile.TarError as error:
        found = f"cut off after {size} bytes, after {last}" if last else "not a whole tar file"
        raise DataError(f"{file} is {found} ({error}); {_REMEDY}") from error
    with open_regular(file) as stream:
        stream.seek(end - end % tarfile.BLOCKSIZE)
        rest = stream.read(tarfile.BLOCKSIZE)
    if rest.strip(b"\0"):
        raise DataError(f"{file} is cut off after {size} bytes, after {last}; {_REMEDY}")
    logger.warning(
        "%s has no end-of-archive mark: if it was cut off between two members, the samples after "
        "%s are missing. Compare its size with the original's",
        file,
        last or "its beginning",
    )
