"""Run train.py and exit rank 1 before it creates the group for checkpoint saves."""

import os
import runpy

from train_server import TRAIN

from torchmm.training.checkpoint import manager


def main() -> int:
    """Run `main` of train.py."""
    if os.environ["RANK"] == "1":
        manager.SideGroup.create = lambda: os._exit(9)
    return int(runpy.run_path(str(TRAIN))["main"]())
