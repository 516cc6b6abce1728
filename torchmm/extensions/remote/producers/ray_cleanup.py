"""Kill the processes of a Ray cluster after the process that started the cluster has exited.

usage: ray_cleanup.py DIRECTORY

The standard input is a pipe from that process. When it closes, all processes with open files below
DIRECTORY, the temporary directory of the cluster, are killed and DIRECTORY is removed. Otherwise
agents of Ray outlive a cluster that was killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path


def kill_users_of(directory: str) -> None:
    """Kill all processes with an open file below a directory."""
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has exited, or has another owner
            if str(file.readlink()).startswith(f"{directory}/"):
                os.kill(int(file.parts[2]), signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_users_of(sys.argv[1])
    shutil.rmtree(sys.argv[1], ignore_errors=True)
