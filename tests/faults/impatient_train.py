"""train.py, but without waiting for another run in its directory to end."""

import runpy

from train_server import TRAIN

from torchmm import checkpoint_directory


def main() -> int:
    """As that of train.py."""
    checkpoint_directory._CLAIM_WAIT_S = 0.1
    return int(runpy.run_path(str(TRAIN))["main"]())
