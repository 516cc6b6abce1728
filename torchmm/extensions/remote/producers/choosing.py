"""Select the producers that a trainer asks for a step, and their order.

Steps are assigned to producers in round-robin order, in proportion to their workers. All ranks that
work on the same samples have the same step numbers and select the same producer, which decodes
shared images once. Busy producers, and producers that did not respond recently, are last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from pyarrow import flight

from torchmm.extensions.remote.producers.calls import IN_VAIN, connect, describe
from torchmm.extensions.remote.producers.registry import MOST_LIST_BYTES, Reported, ask_registry
from torchmm.recipe.data_section import ProducersConfig

REFRESH_S = 2.0
"""Maximum age of the list of producers of a registry in seconds."""
BUSY = 2.0
"""Number of unfinished microbatches per worker above which other producers are preferred."""
MAX_TURNS = 20_000
"""Limit on the turns of all producers before a producer has its next turn."""
AVOIDED_S = 5.0
"""Time in seconds for which a producer that did not respond is last."""

logger = logging.getLogger(__name__)


class Choice:
    """Selection of producers for one data worker. Picklable before its first use.

    Args:
        config: Addresses of the producers, or the registry to which they report.
        fingerprint: Fingerprint of the data and the preprocessing settings, or None for any data.
        certificate: PEM certificate. If None, connections are not encrypted.
    """

    def __init__(
        self, config: ProducersConfig, fingerprint: str | None, certificate: bytes | None
    ) -> None:
        self._registry = config.registry
        self._fingerprint = fingerprint
        self._certificate = certificate
        self._known = [Reported(each, fingerprint or "", 1, 0) for each in config.addresses]
        self._client: flight.FlightClient | None = None
        self._asked_s = -REFRESH_S
        self._failed_s: dict[str, float] = {}
        self.left_out: dict[str, str] = {}
        """Wrong responses by address. These producers are not used again."""
        self.status_warning = ""
        """Error of the registry, or "" without an error."""

    def in_turn(self, number: int) -> list[str]:
        """Return the addresses in the order in which they are asked for step `number`."""
        now = time.monotonic()
        if self._registry is not None and now - self._asked_s > REFRESH_S:
            self._refresh(self._registry)
        avoided = {a: at for a, at in self._failed_s.items() if now - at < AVOIDED_S}
        known = [each for each in self._known if each.address not in self.left_out]
        return in_turn(known, number, avoided)

    def failed(self, address: str) -> None:
        """Move a producer to the end of the order for `AVOIDED_S`, after an error."""
        self._failed_s[address] = time.monotonic()
        self._asked_s = min(self._asked_s, time.monotonic() - REFRESH_S / 2)

    def leave_out(self, address: str, why: str) -> None:
        """Log a wrong response and stop using this producer."""
        self.left_out[address] = why
        logger.warning(
            "producer %s sent a wrong response and is not used any more in this run: %s. Use "
            "the same versions of torchmm and transformers on both hosts (wrong_producers=%d)",
            address,
            why,
            len(self.left_out),
        )

    def _refresh(self, registry: str) -> None:
        self._asked_s = time.monotonic()
        try:
            if self._client is None:
                self._client = connect(registry, self._certificate, MOST_LIST_BYTES)
            listed = ask_registry(self._client)
        except IN_VAIN as error:  # known producers may still be available
            self.status_warning = f"registry {registry}: {describe(error)}"
            logger.debug("%s", self.status_warning)
            return
        self._known = [each for each in listed if self._fingerprint in (None, each.fingerprint)]
        others = len(listed) - len(self._known)
        self.status_warning = (
            f"registry {registry} lists {len(self._known)} producers"
            + f" of the same data and {others} of other data" * bool(others)
        )


def in_turn(
    producers: Sequence[Reported], number: int, avoided: Mapping[str, float] = {}
) -> list[str]:
    """Return the addresses in the order in which producers are asked for step `number`.

    Args:
        producers: Reports of the producers.
        number: Number of the step.
        avoided: Addresses that are last.
    """
    # Larger clusters have the same fractions of fewer turns, so that sorting stays fast.
    scale = max(1.0, sum(each.workers for each in producers) / MAX_TURNS)
    workers = {each.address: max(1, int(each.workers / scale)) for each in producers}
    slots = sorted(
        ((turn + 0.5) / count, address)
        for address, count in workers.items()
        for turn in range(count)
    )
    if not slots:
        return []
    first = number % len(slots)
    turns = [address for _, address in (*slots[first:], *slots[:first])]
    busy = {each.address: each.unfinished >= BUSY * each.workers for each in producers}
    return sorted(dict.fromkeys(turns), key=lambda a: (a in avoided, busy[a]))
