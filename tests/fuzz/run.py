"""Draws recipes, runs each and compares it with plain Hugging Face modules.

    python tests/fuzz/run.py --draws 1000 --seed 7
    python tests/fuzz/run.py --replay outputs/fuzz/draw-7-12.toml

Draw N of a seed is always the same. A failure is shrunk to the smallest recipe that fails like it,
which is written to a file. Exit code 1 if any draw was neither equal nor refused.
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

from fuzz.campaign import Judged, explain, judge_all, read_draw, summary, write_smallest
from fuzz.combinations import write_page
from fuzz.draw import Draw, draw_recipe
from fuzz.judge import Judge


def main() -> int:
    """Parses the command line and judges; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="judged at a time")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for one layout")
    parser.add_argument("--tries", type=int, default=120, help="to shrink a failure; 0: leave it")
    parser.add_argument("--write", type=Path, default=Path("outputs/fuzz"), help="for failures")
    parser.add_argument("--json", type=Path, help="file for all verdicts")
    parser.add_argument("--only-read", action="store_true", help="check without running")
    parser.add_argument("--replay", type=Path, help="judge the draw in this file")
    parser.add_argument("--combinations", action="store_true", help="write their page")
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


def judge_and_print(draws: list[Draw], options: argparse.Namespace) -> list[Judged]:
    """Verdicts; failures are shrunk, told and written where they are met."""
    judged, begin = [], time.monotonic()
    every = judge_all(draws, options.jobs, options.deadline, options.only_read)
    for number, found in enumerate(every, 1):
        judged.append(found)
        spent_s = time.monotonic() - begin
        print(
            f"{number}/{len(draws)} {found.draw.name} {found.verdict.kind} "
            f"{found.verdict.seconds:.1f} s, {spent_s:.0f} s in all",
            flush=True,
        )
        if found.verdict.kind == "failed":
            with Judge(options.deadline) as judge:
                small, file = write_smallest(found, options.write, judge, options.tries)
            print(explain(small, file), flush=True)
    return judged


if __name__ == "__main__":
    sys.exit(main())
