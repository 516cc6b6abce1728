"""Samples that a run skips: corrupt ones, with a limit on their number, and ones beyond a limit.

Samples come from outside and any of them may be broken. A broken one is skipped and named, never
repaired. Rejected: a limit per rank (the run would stop at a point that depends on the number of
ranks) and a limit on consecutive failures (a source that is 30 % broken passes it).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchmm.common.errors import DataError, TorchmmError

MIN_SAMPLES_FOR_FRACTION = 100
"""Below this many samples a fraction says nothing and is not checked."""
SHOWN = 10
"""Corrupt samples of a source that are named; the others are counted."""


LONGEST_REASON = 2000
"""Characters of a message; names inside of data may have millions."""

logger = logging.getLogger(__name__)


class CorruptSampleError(ValueError):
    """One sample cannot be used; the message is the reason, without the sample's name.

    Names out of data are in it: what logs and messages cannot carry (half of a character, control
    characters, megabytes) is escaped or cut here.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


class BeyondLimitError(CorruptSampleError):
    """A valid sample that exceeds a limit of the model or the recipe.

    Such samples are filtered and counted per source. They are not counted as corrupt, so they do
    not stop a run.

    Args:
        limit: the exceeded limit, equal for all samples that exceed it.
        reason: the details of this sample.
    """

    def __init__(self, limit: str, reason: str) -> None:
        super().__init__(reason)
        self.limit = limit


def printable(text: str, longest: int = LONGEST_REASON) -> str:
    """Return text with control characters escaped, at most about `longest` characters of it."""
    if len(text) > longest:  # the reason stands at the end, behind names
        half = longest // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return "".join(escaped)


def first_of(messages: Sequence[str]) -> str:
    """The first corrupt samples, one per line."""
    more = len(messages) - SHOWN
    lines = [*messages[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "".join(f"\n  - {line}" for line in lines)


@contextmanager
def naming_place(where: str) -> Iterator[None]:
    """Makes whatever goes wrong with a record cost this one sample, with its place and the reason.

    Layouts, templates and decoders know many ways in which records are broken; there are more:
    values nested deeper than Python can walk, sizes beyond memory.

    Args:
        where: file and line, put before the reason unless it names them; may be empty.

    Raises:
        CorruptSampleError: anything but an error that ends the run was raised in the block.
    """
    try:
        yield
    except TorchmmError:
        raise
    except CorruptSampleError as error:
        if not where or str(error).startswith(where):
            raise
        reason = f"{where}: {error}"
        if isinstance(error, BeyondLimitError):
            raise BeyondLimitError(error.limit, reason) from error
        raise CorruptSampleError(reason) from error
    except Exception as error:  # counted by CorruptLimit
        logger.debug("unexpected error in %s", where, exc_info=True)
        reason = f"{type(error).__name__}: {error}"
        raise CorruptSampleError(f"{where}: {reason}" if where else reason) from error


class CorruptLimit:
    """Counter of corrupt samples that stops a run if there are too many.

    A corrupt sample counts once per pass over the data. Until the first pass is complete, the
    fraction is that of all measured samples, so that corrupt samples at its start do not stop it.

    Args:
        max_samples: Maximum number of corrupt samples of a pass.
        max_fraction: Maximum fraction of corrupt samples, once 100 samples were seen.
        measured: Number of samples of a pass; 0 if it is unknown, as of streams.
    """

    def __init__(self, max_samples: int, max_fraction: float, measured: int = 0) -> None:
        self.max_samples = max_samples
        self.max_fraction = max_fraction
        self.measured = measured
        self.corrupt = 0
        self.seen = 0

    def add(self, corrupt: int, seen: int) -> None:
        """Add the numbers of one step, summed over data-parallel ranks.

        Raises:
            DataError: more samples are corrupt than accepted.
        """
        self.corrupt += corrupt
        self.seen += seen
        passes = max(1.0, self.seen / self.measured) if self.measured else 1.0
        many = self.corrupt > self.max_samples * passes
        share = self.corrupt / max(self.seen, self.measured, 1)
        dense = self.seen >= MIN_SAMPLES_FOR_FRACTION and share > self.max_fraction
        if many or dense:
            raise DataError(
                f"{self.corrupt} of {self.seen} samples are corrupt, but the limits are "
                f"data.max_corrupt_samples = {self.max_samples} and data.max_corrupt_fraction "
                f"= {self.max_fraction}. The log lists the first {SHOWN} of every source; "
                "remove or repair these samples, or raise the limits"
            )
