"""docs/reference/refused.md: what is refused and why, from the refusals that drawn recipes met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fuzz.wording import Refusal, refusal

FILE = "docs/reference/refused.md"
HEAD = """# What is refused, and why

Before any processes communicate, a recipe is checked against its model and the number of ranks; all
problems are reported at once, with their keys and remedies. This table lists the problems of
{draws:,} random recipes (seed {seed}; {refused:,} were refused), most frequent first.
Numbers are replaced by N, module names by NAME, files by PATH.

Generated: `python tests/fuzz/run.py --only-read --draws {draws} --seed {seed} --docs {file}`

| key | what is wrong | remedy | met |
|---|---|---|---|
"""


def page(problems: Iterable[str], draws: int, seed: int, refused: int) -> str:
    """The whole page."""
    found = Counter(refusal(problem) for problem in problems)
    rows = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    text = HEAD.format(draws=draws, seed=seed, refused=refused, file=FILE)
    return text + "".join(_row(entry, times) for entry, times in rows)


def _row(entry: Refusal, times: int) -> str:
    cells = (f"`{entry.key}`", entry.why, entry.remedy, str(times))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"
