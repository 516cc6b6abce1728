"""Run random recipes and compare each with Hugging Face modules.

    python tests/fuzz/run.py --draws 1000 --seed 7
    python tests/fuzz/run.py --replay outputs/fuzz/draw-7-12.toml

Draw N of a seed is reproducible. A failure is shrunk to the smallest recipe that fails in the same
way, which is written to a file. The exit code is 1 if a draw is neither equal nor rejected.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "helpers"))

from fuzz.campaign import JudgedDraw, explain, judge_all, read_draw, summary, write_smallest
from fuzz.combinations import write_page
from fuzz.draw import Draw, draw_recipe
from fuzz.judge import Judge


def main() -> int:
    """Judge the draws of the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of judges in parallel"
    )
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for one layout")
    parser.add_argument(
        "--tries",
        type=int,
        default=120,
        help="variants to try when shrinking a failure; 0 disables shrinking",
    )
    parser.add_argument(
        "--write", type=Path, default=Path("outputs/fuzz"), help="directory for failures"
    )
    parser.add_argument("--json", type=Path, help="file for all verdicts")
    parser.add_argument("--only-read", action="store_true", help="check without running")
    parser.add_argument("--replay", type=Path, help="judge the draw in this file")
    parser.add_argument(
        "--combinations", action="store_true", help="write the page of supported combinations"
    )
    options = parser.parse_args()
    if options.combinations:
        write_page()
        return 0
    if options.replay is not None:
        draws = [read_draw(options.replay)]
    else:
        numbers = range(options.first, options.first + options.draws)
        draws = [draw_recipe(options.seed, n, tuple(options.worlds)) for n in numbers]
        print(f"seed {options.seed}, draws {numbers.start} to {numbers.stop - 1}", flush=True)
    judged = judge_and_print(draws, options)
    print(summary(judged))
    if options.json is not None:
        rows = [{"draw": j.draw.as_table(), "verdict": asdict(j.verdict)} for j in judged]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(j.verdict.kind == "failed" for j in judged))


def judge_and_print(draws: list[Draw], options: argparse.Namespace) -> list[JudgedDraw]:
    """Return the verdicts. Failures are shrunk, printed and written immediately."""
    judged, begin = [], time.monotonic()
    verdicts = judge_all(draws, options.jobs, options.deadline, options.only_read)
    for number, result in enumerate(verdicts, 1):
        judged.append(result)
        elapsed_s = time.monotonic() - begin
        print(
            f"{number}/{len(draws)} {result.draw.name} {result.verdict.kind} "
            f"{result.verdict.seconds:.1f} s, {elapsed_s:.0f} s in all",
            flush=True,
        )
        if result.verdict.kind == "failed":
            with Judge(options.deadline) as judge:
                small, file = write_smallest(result, options.write, judge, options.tries)
            print(explain(small, file), flush=True)
    return judged


if __name__ == "__main__":
    sys.exit(main())
