"""Judge wrong values in configs and damaged files of models.

python tests/fuzz/run_broken.py --draws 3000 --seed 7
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from fuzz.broken_configs import LIMIT_S, TooSlowError, draw_broken_model, judge_model  # noqa: E402
from fuzz.broken_files import damage_file, judge_file, save_model  # noqa: E402


def main() -> int:
    """Judge the draws of the command line; print a line for each failure and the counts."""
    parser = argparse.ArgumentParser(description="Judge drawn configs and damaged files.")
    parser.add_argument("--draws", type=int, default=1000, help="number of draws of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--only", choices=("models", "files"), help="kind of draws")
    arguments = parser.parse_args()
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        model, damaged = Path(scratch) / "model", Path(scratch) / "damaged"
        save_model(model)
        for index in range(arguments.draws):
            if arguments.only != "files":
                draw = draw_broken_model(arguments.seed, index)
                verdicts[_judge_and_print(f"{draw.name} {draw.changes}", judge_model, draw)] += 1
            if arguments.only != "models":
                damage = damage_file(arguments.seed, index, model, damaged)
                verdicts[_judge_and_print(damage.name, judge_file, damage, damaged)] += 1
    print(dict(verdicts))
    return 0


def _judge_and_print(name: str, judge: Callable[..., str], *arguments: object) -> str:
    """Return the verdict of a draw; print failures and slow draws."""
    start = time.monotonic()
    try:
        verdict = judge(*arguments)
    except (Exception, TooSlowError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        verdict = f"failed: {type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
        print(name[:300], verdict, str(error)[:200], flush=True)
    seconds = time.monotonic() - start
    if verdict == "unnamed" or seconds > LIMIT_S / 2:
        print(name[:300], verdict, f"{seconds:.1f} s", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
