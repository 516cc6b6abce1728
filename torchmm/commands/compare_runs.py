"""Compare the recipes, curves and times of runs.

    torchmm compare outputs/a outputs/b [...] [--output compare.html]

Prints a table and writes an HTML page with one color per run. In a clone,
`scripts/compare_runs.py` accepts the same arguments.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from torchmm.common.log import make_console
from torchmm.extensions.reports.page.html_pages import render_comparison_page
from torchmm.extensions.reports.page.run_contents import RunContents, read_run
from torchmm.extensions.reports.page.sections import compare_metrics, recipe_differences


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="run_dir")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("compare.html"),
        help="HTML file to write (default: compare.html)",
    )
    arguments = parser.parse_args(argv)
    if len(arguments.run_dirs) < 2:
        parser.error("at least two runs are required; for one run, open its index.html")
    runs = []
    for run_dir in arguments.run_dirs:
        if not (run_dir / "metrics.jsonl").exists():
            print(f"{run_dir}: not a run directory (no metrics.jsonl)", file=sys.stderr)
            return 2
        try:
            runs.append(read_run(run_dir))
        except OSError as error:
            print(f"{run_dir}: {error}", file=sys.stderr)
            return 2
    console = make_console()
    print_comparison(console, runs)
    arguments.output.write_text(render_comparison_page(runs), encoding="utf-8", errors="replace")
    console.print(f"curves: {arguments.output}", highlight=False)
    return 0


def print_comparison(console: Console, runs: list[RunContents]) -> None:
    """Print a table of metrics, and a table of the recipe keys that differ."""
    for title, rows in (("Figures", compare_metrics(runs)), ("Recipes", recipe_differences(runs))):
        if not rows:
            continue
        table = Table(title=title, title_justify="left")
        table.add_column("", overflow="fold")  # keys may have a common prefix
        for run in runs:
            table.add_column(run.name, overflow="fold")
        for label, values in rows.items():
            table.add_row(label, *values)
        console.print(table)
