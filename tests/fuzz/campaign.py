"""Many draws, judged by a few judges at a time; what became of them, in words."""

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
class Judged:
    """A draw and its verdict."""

    draw: Draw
    verdict: Verdict

    @property
    def layout(self) -> str:
        """The first layout in one line, and what trains in it."""
        parts = model_types(self.draw.sections["model"])
        keys = ", ".join(sorted(features(self.draw.first.sections)))
        return f"{self.draw.first.world} ranks, {' + '.join(parts)}: {keys}"


def judge_all(
    draws: list[Draw], jobs: int, deadline_s: float, only_read: bool = False
) -> Iterator[Judged]:
    """Verdicts in the order of the draws."""
    judges: SimpleQueue[Judge] = SimpleQueue()
    every = [Judge(deadline_s, only_read=only_read) for _ in range(min(jobs, len(draws)))]
    for judge in every:
        judges.put(judge)

    def judged(draw: Draw) -> Judged:
        judge = judges.get()
        try:
            return Judged(draw, judge(draw))
        finally:
            judges.put(judge)

    try:
        with ThreadPoolExecutor(len(every)) as pool:
            yield from pool.map(judged, draws)
    finally:
        for judge in every:
            judge.close()


def features(table: Table, prefix: str = "") -> Iterator[str]:
    """Keys of a layout; with their values where these are words."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from features(value, f"{name}.")
        else:
            yield f"{name}={value}"


def oddest(judged: list[Judged], count: int) -> list[Judged]:
    """Those that ran whose keys and values are rarest together."""
    ran = [j for j in judged if j.verdict.kind != "refused"]
    own = {id(j): set(features(j.draw.first.sections)) for j in ran}
    times = Counter(f for found in own.values() for f in found)

    def oddity(j: Judged) -> float:
        return sum(math.log(len(ran) / times[f]) for f in own[id(j)])

    return sorted(ran, key=oddity, reverse=True)[:count]


def summary(judged: list[Judged]) -> str:
    """Counts, the slowest ten, the oddest ten."""
    kinds = Counter(j.verdict.kind for j in judged)
    resumed = Counter(j.verdict.then for j in judged if j.verdict.kind == "equal")
    lines = [
        f"{len(judged)} draws: {kinds['equal']} equal, {kinds['refused']} refused, "
        f"{kinds['failed']} failed" + (f", {kinds['read']} only read" if kinds["read"] else ""),
        f"of the equal ones {resumed['equal']} went on equal in another layout, for "
        f"{resumed['refused']} all others were refused",
    ]
    slowest = sorted(judged, key=lambda j: j.verdict.seconds, reverse=True)[:10]
    for title, some in (("slowest", slowest), ("oddest", oddest(judged, 10))):
        lines.append(f"{title}:")
        lines += [
            f"  {j.draw.name} {j.verdict.kind} {j.verdict.seconds:.1f} s: {j.layout}" for j in some
        ]
    return "\n".join(lines)


def explain(found: Judged, file: Path) -> str:
    """A failure in words, with the command that repeats it."""
    problems = "\n".join(f"  {problem.strip()}" for problem in found.verdict.problems[:8])
    return (
        f"draw {found.draw.name}: {found.verdict.how}; {found.layout}\n{problems}\n"
        f"again: python tests/fuzz/run.py --replay {file}"
    )


def write_smallest(
    found: Judged, directory: Path, judge: Callable[[Draw], Verdict], tries: int = 150
) -> tuple[Judged, Path]:
    """Shrinks a failure and writes what is left of it; that, and the file."""
    small = Judged(*shrink(found.draw, found.verdict, judge, tries))
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"draw-{found.draw.name}.toml"
    notes = "".join(f"# {line}\n" for line in explain(small, file).splitlines())
    file.write_text(notes + tomli_w.dumps(small.draw.as_table()))
    return small, file


def read_draw(file: Path) -> Draw:
    """What `write_smallest` wrote."""
    return Draw.from_table(tomli.loads(file.read_text()))
