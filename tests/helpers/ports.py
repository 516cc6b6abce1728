"""TCP ports for tests."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

BELOW_EPHEMERAL = range(15000, 32000)
"""Ports below those that systems assign to connections, so that a free port remains free."""
LAST_PORT = Path(tempfile.gettempdir()) / f"torchmm_test_ports_{os.getuid()}"
"""File with the last assigned port, shared by all test processes of a user.

A port that is assigned but not yet in use is assigned again only after all others.
"""


def free_port() -> int:
    """Return a port that is not in use and was not assigned recently."""
    with LAST_PORT.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        port = int(file.read() or BELOW_EPHEMERAL[-1])
        for _ in BELOW_EPHEMERAL:
            port = port + 1 if port < BELOW_EPHEMERAL[-1] else BELOW_EPHEMERAL[0]
            if _is_free(port):
                file.truncate(0)
                file.write(str(port))
                return port
    raise OSError(f"no free port in {BELOW_EPHEMERAL}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
