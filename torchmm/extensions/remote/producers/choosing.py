"""Which producers a trainer asks for a step, and in which order.

Steps go to producers in turn, to each as often as it has workers: all ranks that work on the same
samples count steps alike and ask the same one, which decodes what they share once. Those that have
much to do, or did not answer lately, come last.
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
"""How old what is known of a registry's producers may be."""
BUSY = 2.0
"""Unfinished microbatches per worker from which on others are asked first."""
MAX_TURNS = 20_000
"""Limit on the turns of all producers before a producer has its next turn."""
AVOIDED_S = 5.0
"""How long one that did not answer comes last."""

logger = logging.getLogger(__name__)


class Choice:
    """The producers that one data worker asks; picklable until it is used.

    Args:
        config: their addresses, or the registry that they report to.
        fingerprint: of the data and how they are prepared; None: any.
        certificate: PEM; None: nothing is encrypted.
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
        """Wrong responses by address; these producers are not asked again."""
        self.complaint = ""
        """What is wrong with the registry."""

    def in_turn(self, number: int) -> list[str]:
        """Addresses in the order in which they are to be asked for step `number`."""
        now = time.monotonic()
        if self._registry is not None and now - self._asked_s > REFRESH_S:
            self._refresh(self._registry)
        avoided = {a: at for a, at in self._failed_s.items() if now - at < AVOIDED_S}
        known = [each for each in self._known if each.address not in self.left_out]
        return in_turn(known, number, avoided)

    def failed(self, address: str) -> None:
        """It did not answer, or not as it should."""
        self._failed_s[address] = time.monotonic()
        self._asked_s = min(self._asked_s, time.monotonic() - REFRESH_S / 2)

    def leave_out(self, address: str, why: str) -> None:
        """Log a wrong response and stop asking this producer."""
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
        except IN_VAIN as error:  # those that were known may still be there
            self.complaint = f"registry {registry}: {describe(error)}"
            logger.debug("%s", self.complaint)
            return
        self._known = [each for each in listed if self._fingerprint in (None, each.fingerprint)]
        others = len(listed) - len(self._known)
        self.complaint = (
            f"registry {registry} lists {len(self._known)} producers"
            + f" of the same data and {others} of other data" * bool(others)
        )


def in_turn(
    producers: Sequence[Reported], number: int, avoided: Mapping[str, float] = {}
) -> list[str]:
    """Addresses in the order in which producers are to be asked for step `number`.

    Args:
        avoided: addresses that come last.
    """
    # Larger clusters get the same shares of fewer turns, so that sorting stays fast.
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
