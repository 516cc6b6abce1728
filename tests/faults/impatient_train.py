"""train.py, but without waiting for another run in its directory to end."""

import runpy

from train_server import TRAIN

from torchmm.training.checkpoint import directory as checkpoint_directory


def main() -> int:
    """As that of train.py."""
    checkpoint_directory._LOCK_WAIT_S = 0.1
    return int(runpy.run_path(str(TRAIN))["main"]())
