"""Run train.py with a main thread that hangs after SIGUSR2.

Other threads continue.
"""

import runpy
import signal
import time

from train_server import TRAIN


def main() -> int:
    """Run `main` of train.py."""
    signal.signal(signal.SIGUSR2, lambda number, frame: time.sleep(1e6))
    return int(runpy.run_path(str(TRAIN))["main"]())


if __name__ == "__main__":
    raise SystemExit(main())
