#!/usr/bin/env python3
"""Index the data of a recipe before a run: write all sample sizes to `data.index_cache_dir`.

    python scripts/index_data.py --config recipe.toml --workers 32
    python scripts/index_data.py --config recipe.toml --shards 3/64   # job 3 of 64, counted from 0

A run indexes missing shards on one rank per file system. The jobs of an array index them on several
hosts: each job indexes every n-th shard, and the last job writes the manifest. A restarted job
continues with the remaining shards. The index is bitwise identical to the index of a run. The exit
code is 0 if all requested shards are indexed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

from torchmm.common.errors import TorchmmError
from torchmm.common.log import report_imports
from torchmm.recipe.read import load_recipe

if TYPE_CHECKING:
    from torchmm.data.sources.index.index_builder import IndexBuilder

logger = logging.getLogger("torchmm.index_data")


def parse_shard(text: str) -> tuple[int, int]:
    """Parse a shard such as "3/64" into two numbers."""
    number, _, count = text.partition("/")
    shard = int(number), int(count)
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(text)
    return shard


def list_index_builders(config: str, overrides: list[str], workers: int) -> list[IndexBuilder]:
    """Return the indices of all sources of the recipe, including validation sources."""
    recipe = load_recipe(config, overrides).recipe
    with report_imports():
        from torchmm.data.sources.open import make_reader, open_index_builders
        from torchmm.data.tokenizer import load_tokenizer
        from torchmm.planning.recipe_model import recipe_model

    data = recipe.data.model_copy(update={"workers": workers})
    model = recipe_model(recipe)
    specs = model.sample_specs(load_tokenizer(recipe.model))
    indices = []
    for validation in (False, True):
        reader = make_reader(data, recipe.training, **specs, validation=validation)
        indices += open_index_builders(
            data, recipe.training, reader, specs["tokenizer"], validation
        )
    return [building for _, _, building in indices if building is not None]


def main() -> int:
    """Run the command line, and return an exit code of `train.py`."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Use --section.key VALUE to override any key of the recipe.",
    )
    parser.add_argument("--config", required=True, help="recipe (TOML file)")
    parser.add_argument(
        "--shards", type=parse_shard, default=(0, 1), help="k/n: index every n-th shard from k"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    arguments, overrides = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    first, step = arguments.shards
    try:
        for building in list_index_builders(arguments.config, overrides, arguments.workers):
            building.prepare()
            building.measure(range(first, len(building.ranges), step))
            done = "complete" if building.finish() else "shards of other jobs are missing"
            logger.info("source %s: %s: %s", building.name, building.directory, done)
    except TorchmmError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
