"""docs/reference/supported_combinations.md: combinations that are rejected, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fuzz.wording import Refusal, refusal

FILE = "docs/reference/supported_combinations.md"
HEAD = """# What is refused, and why

Before any processes communicate, a recipe is checked against its model and the number of ranks; all
problems are reported at once, with their keys and remedies. This table lists the problems of
{draws:,} random recipes (seed {seed}; {refused:,} were refused), most frequent first.
Numbers are replaced by N, module names by NAME, files by PATH.

Generated: `python tests/fuzz/run.py --only-read --draws {draws} --seed {seed} --docs {file}`

| key | what is wrong | remedy | met |
|---|---|---|---|
"""

TAIL = """
## Generators that are refused

`UNet2DConditionModel`, the U-Net of Stable Diffusion and of DistTrain's models, is no generator
here:

- A pipeline cuts a module between layers, and one hidden state goes from stage to stage. In a
  U-Net each layer on the way down hands its result to one on the way up, too. At the narrowest
  place of Stable Diffusion 2.1's, for an image of 512 pixels, the hidden state has 82 thousand
  values, and what passes beside it 6.6 million. So a U-Net would be a single stage: all of its
  time on one rank, which no schedule can divide, and all of its 866 million parameters gathered
  at once.
- Planners place, order and fit stages by times and bytes that are sums over the components of
  transformer layers (`torchmm/costs/components.py`), compared with real ones at every
  allocation. What convolutions keep for backward, and what is computed again, none of them says;
  the autoencoder before a generator of latents has forwards only. A rank with guessed bytes would
  not keep to a memory limit.

`recipes/papers/bases/disttrain.toml` has a DiT of about as many parameters and FLOPs in its
place.
"""
"""What recipes that are drawn do not meet."""


def page(problems: Iterable[str], draws: int, seed: int, refused: int) -> str:
    """The whole page."""
    found = Counter(refusal(problem) for problem in problems)
    rows = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    text = HEAD.format(draws=draws, seed=seed, refused=refused, file=FILE)
    return text + "".join(_row(entry, times) for entry, times in rows) + TAIL


def _row(entry: Refusal, times: int) -> str:
    cells = (f"`{entry.key}`", entry.why, entry.remedy, str(times))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"
