"""Judge draws in several processes, and summarize the verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import tomli
import tomli_w

from fuzz.draw import Draw
from fuzz.judge import Judge, Verdict
from fuzz.models import model_types
from fuzz.shrink import shrink

Table = dict[str, Any]


@dataclass(frozen=True)
class JudgedDraw:
    """A draw and its verdict."""

    draw: Draw
    verdict: Verdict

    @property
    def layout(self) -> str:
        """First layout and model of the draw in one line."""
        parts = model_types(self.draw.sections["model"])
        keys = ", ".join(sorted(features(self.draw.first.sections)))
        return f"{self.draw.first.world} ranks, {' + '.join(parts)}: {keys}"


def judge_all(
    draws: list[Draw], jobs: int, deadline_s: float, only_read: bool = False
) -> Iterator[JudgedDraw]:
    """Yield verdicts in the order of the draws."""
    judges: SimpleQueue[Judge] = SimpleQueue()
    workers = [Judge(deadline_s, only_read=only_read) for _ in range(min(jobs, len(draws)))]
    for judge in workers:
        judges.put(judge)

    def judge_draw(draw: Draw) -> JudgedDraw:
        judge = judges.get()
        try:
            return JudgedDraw(draw, judge(draw))
        finally:
            judges.put(judge)

    try:
        with ThreadPoolExecutor(len(workers)) as pool:
            yield from pool.map(judge_draw, draws)
    finally:
        for judge in workers:
            judge.close()


def features(table: Table, prefix: str = "") -> Iterator[str]:
    """Yield the keys and values of a layout."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from features(value, f"{name}.")
        else:
            yield f"{name}={value}"


def rarest(judged: list[JudgedDraw], count: int) -> list[JudgedDraw]:
    """Return executed draws with the rarest combinations of keys and values."""
    executed = [j for j in judged if j.verdict.kind != "rejected"]
    features_of = {id(j): set(features(j.draw.first.sections)) for j in executed}
    times = Counter(f for keys in features_of.values() for f in keys)

    def rarity(j: JudgedDraw) -> float:
        return sum(math.log(len(executed) / times[f]) for f in features_of[id(j)])

    return sorted(executed, key=rarity, reverse=True)[:count]


def summary(judged: list[JudgedDraw]) -> str:
    """Return the counts, and the ten slowest and ten rarest draws."""
    kinds = Counter(j.verdict.kind for j in judged)
    resumed = Counter(j.verdict.then for j in judged if j.verdict.kind == "equal")
    lines = [
        f"{len(judged)} draws: {kinds['equal']} equal, {kinds['rejected']} rejected, "
        f"{kinds['failed']} failed" + (f", {kinds['read']} only read" if kinds["read"] else ""),
        f"{resumed['equal']} of the equal draws resumed equally in another layout. For "
        f"{resumed['rejected']}, all other layouts were rejected",
    ]
    slowest = sorted(judged, key=lambda j: j.verdict.seconds, reverse=True)[:10]
    for title, some in (("slowest", slowest), ("rarest", rarest(judged, 10))):
        lines.append(f"{title}:")
        lines += [
            f"  {j.draw.name} {j.verdict.kind} {j.verdict.seconds:.1f} s: {j.layout}" for j in some
        ]
    return "\n".join(lines)


def explain(failure: JudgedDraw, file: Path) -> str:
    """Return a description of a failure, with the command that repeats it."""
    problems = "\n".join(f"  {problem.strip()}" for problem in failure.verdict.problems[:8])
    return (
        f"draw {failure.draw.name}: {failure.verdict.how}; {failure.layout}\n{problems}\n"
        f"again: python tests/fuzz/run.py --replay {file}"
    )


def write_smallest(
    failure: JudgedDraw, directory: Path, judge: Callable[[Draw], Verdict], tries: int = 150
) -> tuple[JudgedDraw, Path]:
    """Shrink a failure, write the smallest draw, and return it with its file."""
    small = JudgedDraw(*shrink(failure.draw, failure.verdict, judge, tries))
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"draw-{failure.draw.name}.toml"
    notes = "".join(f"# {line}\n" for line in explain(small, file).splitlines())
    file.write_text(notes + tomli_w.dumps(small.draw.as_table()))
    return small, file


def read_draw(file: Path) -> Draw:
    """Read a file of `write_smallest`."""
    return Draw.from_table(tomli.loads(file.read_text()))
