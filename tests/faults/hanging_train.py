"""train.py whose main thread stands still for ever when its process gets SIGUSR2; others go on."""

import runpy
import signal
import time

from train_server import TRAIN


def main() -> int:
    """As that of train.py."""
    signal.signal(signal.SIGUSR2, lambda number, frame: time.sleep(1e6))
    return int(runpy.run_path(str(TRAIN))["main"]())


if __name__ == "__main__":
    raise SystemExit(main())
