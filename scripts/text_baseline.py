"""Compare the validation losses of a trained model and of models without image input.

    python scripts/text_baseline.py outputs/smollm2_vision
    python scripts/text_baseline.py outputs/smollm2_vision \\
        --blank-images outputs/smollm2_vision_blind

--blank-images is a run of the same recipe that was trained with all-zero images. Its loss shows
how well
captions are predicted without images. The script uses one process and reads the newest checkpoint
of each run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from torchmm.common.errors import TorchmmError
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress
from torchmm.recipe.changes import reject_renamed_options
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe

if TYPE_CHECKING:
    from torchmm.planning.resolved_recipe import ResolvedRecipe


def main() -> int:
    """Print the table of the run directories on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="run directory of the trained model")
    parser.add_argument(
        "--blank-images", type=Path, help="run directory of training with all-zero images"
    )
    reject_renamed_options(parser, "text_baseline")
    arguments = parser.parse_args()
    log_to_console(make_console(stderr=True), only_progress=True)
    try:
        rows = _losses(arguments.run_dir, arguments.blank_images)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    table = Table(title="Validation loss per caption token", title_justify="left")
    table.add_column("model")
    table.add_column("images")
    table.add_column("loss", justify="right")
    for model, images, loss in rows:
        table.add_row(model, images, f"{loss:.3f}")
    make_console().print(table)
    return 0


def _losses(run_dir: Path, blind_dir: Path | None) -> list[tuple[str, str, float]]:
    with report_imports():
        from torchmm.extensions.evaluation.ablation import image_losses, text_only_loss
        from torchmm.parallel.mesh import build_mesh, select_device, start_process_group

    with report_progress("measuring losses"):
        run = _read_run(run_dir)
        device = select_device(run.recipe.training.device)
        single = ParallelConfig()
        start_process_group(single, device)
        mesh = build_mesh(single, device)
        rows = [("pretrained LLM", "none", text_only_loss(run, mesh))]
        if blind_dir is not None:
            blind = image_losses(_read_run(blind_dir), blind_dir, mesh)
            rows.append(("trained without images", "blank", blind["blank"]))
        losses = image_losses(run, run_dir, mesh)
    names = {"blank": "blank", "other": "of another sample", "own": "its own"}
    return rows + [("trained", name, losses[key]) for key, name in names.items()]


def _read_run(run_dir: Path) -> ResolvedRecipe:
    from torchmm.planning.resolved_recipe import resolve_recipe

    recipe = load_recipe(run_dir / "recipe.toml", [], world_size=1).recipe
    return resolve_recipe(recipe.model_copy(update={"parallel": ParallelConfig()}), 1)


if __name__ == "__main__":
    sys.exit(main())
