"""Draws and judges many recipes."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.draw import draw_recipe
from fuzz.judge import Judge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    counts = {"equal": 0, "refused": 0, "failed": 0}
    begin = time.time()
    judges: Queue = Queue()
    for _ in range(options.jobs):
        judges.put(Judge())

    def one(index):
        draw = draw_recipe(options.seed, index)
        judge = judges.get()
        try:
            verdict = judge(draw)
        finally:
            judges.put(judge)
        return index, draw, verdict

    with ThreadPoolExecutor(options.jobs) as pool:
        for index, draw, verdict in pool.map(one, range(options.first, options.first + options.draws)):
            counts[verdict.kind] += 1
            print(index, verdict.kind, verdict.how, verdict.then, f"{verdict.seconds:.1f}s", f"total {time.time() - begin:.0f}s", flush=True)
            if verdict.kind != "equal":
                print("   ", draw.first, draw.source, draw.sections["model"]["llm"]["config"]["model_type"])
                for p in verdict.problems[:6]:
                    print("      ", p[-1200:])
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
