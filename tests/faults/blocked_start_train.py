"""Run train.py with a function that does not return, for stop signals before the first step.

Environment variables: BLOCKED names the function (`package.module:name`). BLOCKED_RANK limits it to
one rank. BLOCKED_IN is "python" or "c". The C code neither returns to the interpreter nor holds the
GIL, like tokenizers and collectives.
"""

import hashlib
import os
import pkgutil
import runpy
import time

from train_server import TRAIN


def block(*args: object, **options: object) -> None:
    """Block for hours."""
    os.write(1, b"blocked\n")
    if os.environ["BLOCKED_IN"] == "c":
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2**31 - 1)
    time.sleep(1e6)


def main() -> int:
    """Run `main` of train.py."""
    module, _, name = os.environ["BLOCKED"].partition(":")
    if os.environ.get("BLOCKED_RANK", os.environ.get("RANK")) == os.environ.get("RANK"):
        setattr(pkgutil.resolve_name(module), name, block)
    return int(runpy.run_path(str(TRAIN))["main"]())
