"""Score the text that an exported model generates for validation samples.

    torchmm evaluate outputs/mine        # hf/ of a run, validation data of its recipe
    torchmm evaluate outputs/mine --export hf-ema --samples 500
    torchmm evaluate exports/mine --recipe recipes/mine.toml
    torchmm evaluate outputs/mine --tasks mmmu_val my_task --task-folder tasks --limit 200
    torchmm evaluate exports/mine --data questions.jsonl --scores vqa_accuracy exact_match

`generate` of Hugging Face generates the text in batches, with the prompts of training. Only
lmms-eval tasks download data; they require scripts/lmms_eval.sh. Scores are printed. For a run
directory, they are also appended to its evaluations.jsonl. In a clone, `scripts/evaluate.py`
accepts the same arguments.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.table import Table

from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress
from torchmm.extensions.evaluation.section import BenchmarksConfig
from torchmm.recipe.data_section import DataConfig, Score, SourceConfig
from torchmm.recipe.read import load_recipe
from torchmm.recipe.training_section import TrainingConfig, ValidationConfig
from torchmm.training.tracking.evaluations import Evaluation, append_evaluation

if TYPE_CHECKING:
    from torchmm.extensions.evaluation.samples import GeneratedText

SEQUENCE_LENGTH = 4096
"""Maximum sequence length in tokens of samples without a recipe."""


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    arguments = _parser(prog).parse_args(argv)
    log_to_console(make_console(stderr=True), only_progress=True)
    try:
        _evaluate(arguments)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _evaluate(arguments: argparse.Namespace) -> None:
    """Evaluate an export, print the scores and save them.

    Raises:
        TorchmmError: The export cannot be evaluated.
    """
    export: Path = arguments.model
    run_dir: Path | None = None
    if (export / "recipe.toml").is_file():
        run_dir = export
        export = run_dir / arguments.export
        if not export.is_dir():
            exports = sorted(p.name for p in run_dir.glob("hf*") if p.is_dir()) or ["none"]
            raise ConfigError(
                f"{export}: no such export; available: {', '.join(exports)}. Use `torchmm "
                "export` to export a checkpoint"
            )
    # The card of an export has the number of training steps.
    card = export / "README.md"
    line = re.search(r"^- step ([\d,]+) of", card.read_text(), re.M) if card.is_file() else None
    step = int(line[1].replace(",", "")) if line else None
    texts: list[GeneratedText] = []
    if arguments.tasks:
        evaluation = _run_tasks(arguments, export, step)
    else:
        evaluation, texts = _score_samples(arguments, export, run_dir, step)

    after = "" if step is None else f" after step {step}"
    table = Table(title=f"{evaluation.export}{after}", title_justify="left")
    table.add_column("source")
    table.add_column("score")
    table.add_column("value", justify="right")
    table.add_column("samples", justify="right")
    for name, value in evaluation.scores.items():
        source, _, kind = name.rpartition("/")
        table.add_row(source, kind, f"{value:.4f}", str(evaluation.samples.get(source, "")))
    make_console().print(table)
    if run_dir is not None:
        append_evaluation(run_dir, evaluation)
    if arguments.json is not None:
        content = {**asdict(evaluation), "texts": [asdict(text) for text in texts]}
        arguments.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _run_tasks(arguments: argparse.Namespace, export: Path, step: int | None) -> Evaluation:
    """Return the scores of lmms-eval tasks.

    Raises:
        ConfigError: Lmms-eval is not installed, or it failed.
    """
    config = BenchmarksConfig(
        tasks=arguments.tasks,
        folder=arguments.task_folder,
        limit=arguments.limit,
        batch_size=arguments.batch_size,
        python=arguments.task_python,
    )
    if not Path(config.python).is_file():
        raise ConfigError(f"{config.python}: no such program; run scripts/lmms_eval.sh")
    with report_imports():
        from torchmm.extensions.evaluation import benchmarks

    with tempfile.TemporaryDirectory() as scratch, report_progress("answering"):
        return benchmarks.run_in_foreground(config, export, Path(scratch) / "scores.json", step)


def _score_samples(
    arguments: argparse.Namespace, export: Path, run_dir: Path | None, step: int | None
) -> tuple[Evaluation, list[GeneratedText]]:
    """Return scores and generated text of held-out samples.

    Raises:
        ConfigError, DataError: No held-out sources or scores are set, or a source or the export
            cannot be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = arguments.recipe or (run_dir and run_dir / "recipe.toml")
        max_new_tokens = ValidationConfig().max_new_tokens
        if arguments.data:
            sources = [SourceConfig(path=path, prompt=arguments.prompt) for path in arguments.data]
            data = DataConfig(validation=sources, index_cache_dir=scratch)
            training = TrainingConfig(sequence_length=SEQUENCE_LENGTH)
        elif file is None:
            raise ConfigError(
                "no evaluation data; set --data or --recipe, or evaluate a run directory"
            )
        else:
            recipe = load_recipe(file, []).recipe
            data = recipe.data
            training = recipe.training
            max_new_tokens = recipe.validation.max_new_tokens
        sources = data.validation
        if not sources:
            raise ConfigError(f"{file}: has no validation data; add a [[data.validation]] table")
        if arguments.scores:
            sources = [s.model_copy(update={"metrics": arguments.scores}) for s in sources]
        if not any(source.metrics for source in sources):
            raise ConfigError(
                "no metrics are set for the sources; set --scores, or `scores` in a "
                f"[[data.validation]] table, to one of: {', '.join(get_args(Score))}"
            )

        with report_imports():
            import transformers

            from torchmm.extensions.evaluation.hf_generation import generate_held_out_text
            from torchmm.extensions.evaluation.samples import source_scores
            from torchmm.extensions.evaluation.text.load_model import ExportedModel

        transformers.logging.set_verbosity_error()
        with report_progress("answering"):
            texts = generate_held_out_text(
                ExportedModel.read(export),
                data.model_copy(update={"validation": sources}),
                training,
                samples=arguments.samples,
                max_new_tokens=arguments.max_new_tokens or max_new_tokens,
                batch_size=arguments.batch_size,
            )
    counts = dict(Counter(text.source for text in texts))
    return Evaluation(str(export), step, source_scores(texts, sources), counts), texts


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="exported directory or run directory")
    add(
        "--export",
        default="hf",
        metavar="NAME",
        help="name of the export in the run directory (default: %(default)s)",
    )
    add(
        "--recipe",
        type=Path,
        metavar="FILE",
        help="recipe whose [[data.validation]] sources are used",
    )
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="data sources, instead of those of a recipe",
    )
    add("--prompt", default="", help="with --data: text after the image in caption data")
    add(
        "--scores",
        nargs="+",
        choices=get_args(Score),
        help="metrics, instead of those of the sources",
    )
    add(
        "--samples",
        type=int,
        default=100,
        metavar="N",
        help="number of samples over all sources (default: 100)",
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="maximum number of generated tokens per sample (default: the value of the recipe)",
    )
    add(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="number of samples generated in one batch (default: 8)",
    )
    add(
        "--tasks",
        nargs="+",
        default=[],
        metavar="NAME",
        help="lmms-eval tasks, instead of data sources",
    )
    add("--task-folder", metavar="DIR", help="folder with additional tasks")
    add(
        "--task-python",
        default=".lmms-eval/bin/python",
        help="Python interpreter with lmms-eval (default: %(default)s)",
    )
    add("--limit", type=int, metavar="N", help="number of samples per task (default: all)")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="additional JSON file for scores and generated text",
    )
    return parser
