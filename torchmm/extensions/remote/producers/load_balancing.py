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

from torchmm.extensions.remote.producers.registry import (
    MAX_LIST_BYTES,
    ProducerStatus,
    list_producers,
)
from torchmm.extensions.remote.producers.rpc import CALL_ERRORS, connect_client, describe_error
from torchmm.recipe.data_section import ProducersConfig

REFRESH_S = 2.0
"""Maximum age of the list of producers of a registry in seconds."""
MAX_UNFINISHED_PER_WORKER = 2.0
"""Number of unfinished microbatches per worker above which other producers are preferred."""
MAX_SLOTS = 20_000
"""Limit on the turns of all producers before a producer has its next turn."""
BACKOFF_S = 5.0
"""Time in seconds for which a producer that did not respond is last."""

logger = logging.getLogger(__name__)


class ProducerSelector:
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
        self._known = [ProducerStatus(each, fingerprint or "", 1, 0) for each in config.addresses]
        self._client: flight.FlightClient | None = None
        self._refreshed_s = -REFRESH_S
        self._failed_s: dict[str, float] = {}
        self.excluded: dict[str, str] = {}
        """Wrong responses by address. These producers are not used again."""
        self.registry_error = ""
        """Error of the registry, or "" without an error."""

    def order_producers(self, number: int) -> list[str]:
        """Return the addresses in the order in which they are asked for step `number`."""
        now = time.monotonic()
        if self._registry is not None and now - self._refreshed_s > REFRESH_S:
            self._refresh(self._registry)
        deprioritized = {a: at for a, at in self._failed_s.items() if now - at < BACKOFF_S}
        known = [each for each in self._known if each.address not in self.excluded]
        return order_producers(known, number, deprioritized)

    def mark_failed(self, address: str) -> None:
        """Move a producer to the end of the order for `BACKOFF_S`, after an error."""
        self._failed_s[address] = time.monotonic()
        self._refreshed_s = min(self._refreshed_s, time.monotonic() - REFRESH_S / 2)

    def exclude(self, address: str, reason: str) -> None:
        """Log a wrong response and stop using this producer."""
        self.excluded[address] = reason
        logger.warning(
            "producer %s sent a wrong response and is not used any more in this run: %s. Use "
            "the same versions of torchmm and transformers on both hosts (wrong_producers=%d)",
            address,
            reason,
            len(self.excluded),
        )

    def _refresh(self, registry: str) -> None:
        self._refreshed_s = time.monotonic()
        try:
            if self._client is None:
                self._client = connect_client(registry, self._certificate, MAX_LIST_BYTES)
            listed = list_producers(self._client)
        except CALL_ERRORS as error:  # known producers may still be available
            self.registry_error = f"registry {registry}: {describe_error(error)}"
            logger.debug("%s", self.registry_error)
            return
        self._known = [each for each in listed if self._fingerprint in (None, each.fingerprint)]
        num_others = len(listed) - len(self._known)
        self.registry_error = (
            f"registry {registry} lists {len(self._known)} producers"
            + f" of the same data and {num_others} of other data" * bool(num_others)
        )


def order_producers(
    producers: Sequence[ProducerStatus], number: int, deprioritized: Mapping[str, float] = {}
) -> list[str]:
    """Return the addresses in the order in which producers are asked for step `number`.

    Args:
        producers: Reports of the producers.
        number: Number of the step.
        deprioritized: Addresses that are last.
    """
    # Larger clusters have the same fractions of fewer turns, so that sorting stays fast.
    scale = max(1.0, sum(each.workers for each in producers) / MAX_SLOTS)
    workers = {each.address: max(1, int(each.workers / scale)) for each in producers}
    slots = sorted(
        ((slot + 0.5) / count, address)
        for address, count in workers.items()
        for slot in range(count)
    )
    if not slots:
        return []
    first = number % len(slots)
    turns = [address for _, address in (*slots[first:], *slots[:first])]
    busy = {
        each.address: each.unfinished >= MAX_UNFINISHED_PER_WORKER * each.workers
        for each in producers
    }
    return sorted(dict.fromkeys(turns), key=lambda a: (a in deprioritized, busy[a]))
