"""Check that checkpoints are complete and unmodified, with SHA-256 hashes.

usage: verify_checkpoint.py PATH ...

PATH is a checkpoint ("step-N"), a directory of checkpoints, or a run directory. Exit code 4 if
any checkpoint is corrupt, of a newer format, or none is found.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmm.common.errors import CheckpointError
from torchmm.common.log import log_to_console, make_console, report_progress
from torchmm.training.checkpoint.manifest import (
    NewerFormatError,
    checkpoints_at,
    find_problems,
    read_manifest,
    reject_newer_format,
)


def describe(path: Path) -> str:
    """Return one line about a valid checkpoint."""
    manifest = read_manifest(path)
    size_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    layout = " ".join(f"{name}={size}" for name, size in manifest["layout"].items())
    return f"{path}: valid, {size_bytes:,} bytes, {layout}, torch {manifest['torch']}"


def verdict(path: Path) -> str:
    """Return the verdict on an invalid checkpoint, which a newer version may have saved."""
    try:
        reject_newer_format(path)
    except NewerFormatError:
        return "NOT CHECKED"
    return "DAMAGED"


def main() -> int:
    """Print one line per checkpoint, and its problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    paths = parser.parse_args().paths
    log_to_console(make_console(stderr=True), only_progress=True)
    damaged = False
    for path in paths:
        checkpoints = checkpoints_at(path)
        if not checkpoints:
            print(f"{path}: no checkpoint found")
            damaged = True
        for checkpoint in checkpoints:
            with report_progress(f"reading {checkpoint}"):
                problems = find_problems(checkpoint)
            print(f"{checkpoint}: {verdict(checkpoint)}" if problems else describe(checkpoint))
            for problem in problems:
                print(f"  - {problem}")
            damaged = damaged or bool(problems)
    return CheckpointError.exit_code if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
