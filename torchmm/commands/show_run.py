"""Show status, losses, slowest ranks, generated text and files of a run.

    torchmm show outputs/quickstart
    torchmm show outputs/quickstart --page    # only write index.html

In a clone, `scripts/show_run.py` accepts the same arguments.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from torchmm.common.log import make_console
from torchmm.extensions.reports.page.html_pages import write_run_page
from torchmm.extensions.reports.page.run_contents import (
    Records,
    RunContents,
    read_run,
    slowest_ranks,
)

LABELS = {
    "index.html": "report of the run as a page",
    "metrics.jsonl": "metrics, one line per step",
    "recipe.toml": "the resolved recipe",
    "loss.png": "loss curves",
    "captions.png": "validation images with generated and reference captions",
    "samples.json": "generated text of the run",
    "evaluations.jsonl": "scores of exports",
    "checkpoints": "checkpoints to resume from",
    "hf": "Hugging Face export for from_pretrained",
    "hf-ema": "Hugging Face export of the averaged weights",
}
SEPARATE_COMPONENTS_NOTE = (
    "export as separate components; Hugging Face has no class for the complete model"
)
SHOWN_RANKS = 5
STALE_S = 600.0
"""Time without an update after which a run may have been killed, as on its page."""


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--page", action="store_true", help="only write index.html")
    arguments = parser.parse_args(argv)
    run_dir = arguments.run_dir
    if not (run_dir / "metrics.jsonl").exists():
        print(f"{run_dir}: not a run directory (no metrics.jsonl)", file=sys.stderr)
        return 2
    console = make_console()
    try:
        if arguments.page:
            console.out(write_run_page(run_dir), highlight=False)
            return 0
        run = read_run(run_dir)
    except OSError as error:
        print(f"{run_dir}: {error}", file=sys.stderr)
        return 2
    console.out(describe_state(run), highlight=False)
    _show_captions(console, run)
    _show_loss(console, run)
    _show_scores(console, run)
    show_stragglers(console, run.records)
    _show_files(console, run_dir)
    for note in run.skipped:
        print(note, file=sys.stderr)
    return 0


def describe_state(run: RunContents) -> str:
    """Return the state of a run. A killed process leaves the state "running"."""
    state: str = run.status.state if run.status else "unknown"
    silent_s = run.status_age_s
    if state == "running" and silent_s > STALE_S:
        state += f", but no update for {silent_s / 60:,.0f} min; the run may have been killed"
    return f"{run.name}: {state}"


def _show_captions(console: Console, run: RunContents) -> None:
    newest = [entries[-1] for entries in run.samples.values()]
    if not newest:
        return
    last = max(sample.step for sample in newest)
    table = Table(title=f"Validation images after step {last}", title_justify="left")
    table.add_column("generated caption")
    table.add_column("reference caption")
    for sample in newest:
        if sample.step == last:
            table.add_row(sample.generated, sample.truth)
    console.print(table)


def _show_loss(console: Console, run: RunContents) -> None:
    losses = run.points("loss")
    if losses:
        first, begin = losses[0]
        last, last_loss = losses[-1]
        console.print(f"loss {begin:.3f} (step {first}) -> {last_loss:.3f} (step {last})")
    if validated := run.points("validation_loss"):
        console.print("validation loss " + " -> ".join(f"{loss:.3f}" for _, loss in validated))


def _show_scores(console: Console, run: RunContents) -> None:
    """Print the newest scores of the run, and those of its exports."""
    scored = [(f"step {r['step']}", r["scores"]) for r in run.records if r.get("scores")][-1:]
    scored += [(evaluation.export, evaluation.scores) for evaluation in run.evaluations]
    if not scored:
        return
    table = Table(title="Scores of generated text", title_justify="left")
    for name in ("of", "score", "value"):
        table.add_column(name)
    for of, scores in scored:
        for name, value in scores.items():
            table.add_row(of, name, f"{value:.4f}")
    console.print(table)


def show_stragglers(console: Console, records: Records) -> None:
    """Print the ranks that were most often the slowest, by quarters of the run.

    No output for one rank.
    """
    stragglers = slowest_ranks(records, SHOWN_RANKS)
    if stragglers is None:
        return
    table = Table(title="Fraction of steps in which a rank was the slowest", title_justify="left")
    table.add_column("rank")
    for first, last in stragglers.steps:
        table.add_column(f"steps {first} to {last}", justify="right")
    for rank, fractions in stragglers.slowest_fractions.items():
        table.add_row(str(rank), *(f"{fraction:.0%}" for fraction in fractions))
    table.add_row("its time above the median", *(f"{s:.0%}" for s in stragglers.excess_fractions))
    console.print(table)


def _show_files(console: Console, run_dir: Path) -> None:
    for name, meaning in LABELS.items():
        if (run_dir / name).exists():
            is_complete = not name.startswith("hf") or (run_dir / name / "config.json").exists()
            note = meaning if is_complete else SEPARATE_COMPONENTS_NOTE
            console.print(f"{run_dir / name!s:<36} {note}", highlight=False)
