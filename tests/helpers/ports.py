"""TCP ports for tests."""

import random
import socket

BELOW_EPHEMERAL = range(15000, 32000)
"""Systems take the ports of connections from above, so that one found free there may be gone before
it is used; the ports of other tests are drawn at random from the same range."""


def free_port() -> int:
    """A port that nobody listens on now."""
    while True:
        port = random.SystemRandom().choice(BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
