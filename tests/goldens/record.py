"""Rewrite the goldens and print what changed.

Give the reason for every difference in the commit message.

    python tests/goldens/record.py [--only NAME ...] [--check]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import golden  # noqa: E402 - needs the paths above
from train_server import shared_server  # noqa: E402


def main() -> int:
    """Rewrite the lines of the recipes that the command line selects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="recipes (default: all)")
    parser.add_argument("--check", action="store_true", help="print differences, write nothing")
    options = parser.parse_args()
    changed = record_dry_runs(options.only, options.check)
    changed += record_losses(options.only, options.check)
    print(f"{changed} goldens differ")
    return int(options.check and changed > 0)


def record_dry_runs(only: list[str] | None, check: bool) -> int:
    """Plan recipes and return the number of goldens that differ."""
    names = [name for name in golden.recipe_names() if name not in golden.NOT_PLANNED]
    stored = golden.read_goldens(golden.DRY_RUNS)
    lines = {name: line for name, line in stored.items() if name in names}
    changed = 0
    for name in names:
        if only is None or name in only:
            begin_s = time.process_time()
            result = golden.plan_recipe(golden.recipe_names()[name])
            changed += show_differences(name, stored.get(name), result)
            lines[name] = result
            print(f"{name}: {time.process_time() - begin_s:.1f} s of CPU time", flush=True)
            if not check:
                golden.write_goldens(golden.DRY_RUNS, lines)
    return changed


def record_losses(only: list[str] | None, check: bool) -> int:
    """Train quickstarts and return the number of goldens that differ."""
    stored = golden.read_goldens(golden.LOSSES)
    lines = {name: line for name, line in stored.items() if name in golden.QUICKSTARTS}
    changed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in golden.QUICKSTARTS:
            if only is None or name in only:
                result = golden.train_quickstart(name, shared_server(), Path(folder) / name)
                changed += show_differences(name, stored.get(name), result)
                lines[name] = result
    if not check:
        golden.write_goldens(golden.LOSSES, lines)
    return changed


def show_differences(name: str, stored: golden.Golden | None, found: golden.Golden) -> bool:
    """Print how a golden differs from the stored one, and return whether it does."""
    lines = ["new"] if stored is None else golden.differences(stored, found)
    for line in lines:
        print(f"{name}: {line}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
