"""Errors of samples that a run skips, and a limit on the number of corrupt samples.

A corrupt sample is skipped and logged, and never repaired. The limit applies to the sum over all
ranks, so that the step at which a run stops does not depend on the number of ranks. A limit on
consecutive failures would accept a source with 30 % corrupt samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchmm.common.errors import DataError, TorchmmError

MIN_SAMPLES_FOR_FRACTION = 100
"""Minimum number of samples for which the fraction is checked."""
MAX_LOGGED_SAMPLES = 10
"""Number of corrupt samples of a source that are logged. All are counted."""
MAX_REASON_CHARACTERS = 2000
"""Maximum length of a message in characters. Names in data may have millions."""

logger = logging.getLogger(__name__)


class CorruptSampleError(ValueError):
    """Error of one sample that cannot be used. The message is the reason, without the sample name.

    The message may include strings from the data. Control characters and unpaired surrogates are
    escaped, and long messages are shortened.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(escape_text(reason))


class BeyondLimitError(CorruptSampleError):
    """Error of a valid sample that exceeds a limit of the model or the recipe.

    Such samples are filtered and counted per source. They are not counted as corrupt, so they do
    not stop a run.

    Args:
        limit: Description of the limit, identical for all samples that exceed it.
        reason: Details of this sample.
    """

    def __init__(self, limit: str, reason: str) -> None:
        super().__init__(reason)
        self.limit = limit


def escape_text(text: str, max_characters: int = MAX_REASON_CHARACTERS) -> str:
    """Return text with escaped control characters and about `max_characters` characters at most."""
    if len(text) > max_characters:  # the reason is at the end, after names
        half = max_characters // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return "".join(escaped)


def list_messages(messages: Sequence[str]) -> str:
    """Return the first messages about corrupt samples, one per line."""
    more = len(messages) - MAX_LOGGED_SAMPLES
    lines = [*messages[:MAX_LOGGED_SAMPLES], *([f"and {more} more"] if more > 0 else [])]
    return "".join(f"\n  - {line}" for line in lines)


@contextmanager
def record_errors_at(where: str) -> Iterator[None]:
    """Convert exceptions of a block to a `CorruptSampleError` with the location of the record.

    Record formats, chat templates and decoders check for many errors in records. This function
    covers the remaining ones, such as values that exceed the recursion limit.

    Args:
        where: File and line, added to the reason if they are not in it. May be empty.

    Raises:
        CorruptSampleError: The block raised an exception other than `TorchmmError`.
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
    """Counter of corrupt samples that stops a run if a limit is exceeded.

    A corrupt sample is counted once per pass over the data. During the first pass the fraction is
    relative to all samples of a pass, so that corrupt samples at its start do not stop the run.

    Args:
        max_samples: Maximum number of corrupt samples per pass.
        max_fraction: Maximum fraction of corrupt samples, checked after 100 samples.
        samples_per_pass: Number of samples of a pass. 0 if unknown, as for streams.
    """

    def __init__(self, max_samples: int, max_fraction: float, samples_per_pass: int = 0) -> None:
        self.max_samples = max_samples
        self.max_fraction = max_fraction
        self.samples_per_pass = samples_per_pass
        self.corrupt = 0
        self.seen = 0

    def add(self, corrupt: int, seen: int) -> None:
        """Add the sample counts of one step, summed over data-parallel ranks.

        Args:
            corrupt: Number of corrupt samples.
            seen: Number of samples, including corrupt samples.

        Raises:
            DataError: The number or the fraction of corrupt samples exceeds its limit.
        """
        self.corrupt += corrupt
        self.seen += seen
        passes = max(1.0, self.seen / self.samples_per_pass) if self.samples_per_pass else 1.0
        exceeds_count = self.corrupt > self.max_samples * passes
        fraction = self.corrupt / max(self.seen, self.samples_per_pass, 1)
        exceeds_fraction = self.seen >= MIN_SAMPLES_FOR_FRACTION and fraction > self.max_fraction
        if exceeds_count or exceeds_fraction:
            raise DataError(
                f"{self.corrupt} of {self.seen} samples are corrupt, but the limits are "
                f"data.max_corrupt_samples = {self.max_samples} and data.max_corrupt_fraction "
                f"= {self.max_fraction}. The log lists the first {MAX_LOGGED_SAMPLES} of every "
                "source; "
                "remove or repair these samples, or raise the limits"
            )
