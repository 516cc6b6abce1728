"""Run train.py without waiting for another run in the same directory."""

import runpy

from train_server import TRAIN

from torchmm.training.checkpoint import directory as checkpoint_directory


def main() -> int:
    """Run `main` of train.py."""
    checkpoint_directory._LOCK_WAIT_S = 0.1
    return int(runpy.run_path(str(TRAIN))["main"]())
