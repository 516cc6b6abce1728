"""Report record formats, sizes, rejected records and samples of the data of a recipe.

Reads the sources of the recipe like a run, and requires no GPU and no weights. Prints the findings
and writes a page with samples as the model receives them: text with the tokens in the loss, images
before and after preprocessing, and packed sequences. In a clone, `scripts/inspect_data.py` accepts
the same arguments.

    torchmm inspect quickstart
    torchmm inspect my.toml --samples 20 --limit 10000 --out /tmp/page
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmm.commands.arguments import parse_recipe_arguments, recipe_parser
from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.files import make_writable_directory
from torchmm.common.log import (
    iterate_with_progress,
    log_to_console,
    make_console,
    report_imports,
    report_progress,
)
from torchmm.recipe.check import check_source_paths
from torchmm.recipe.read import load_recipe


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = recipe_parser(__doc__, prog)
    add = parser.add_argument
    add("--samples", type=int, default=8, metavar="N", help="samples shown per source (default: 8)")
    add(
        "--limit",
        type=int,
        default=1000,
        metavar="N",
        help="records read per source (default: 1000)",
    )
    add("--decode", action="store_true", help="decode all files, not only their headers")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of the report (default: OUTPUT_DIR/NAME/data)",
    )
    options, overrides = parse_recipe_arguments(parser, arguments)
    try:
        return _inspect(options, overrides)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _inspect(options: argparse.Namespace, overrides: list[str]) -> int:
    recipe = load_recipe(options.config, overrides).recipe
    if problems := [f"{options.config}: {problem}" for problem in check_source_paths(recipe)]:
        raise ConfigError(problems)
    out = options.out or Path(recipe.output_dir) / recipe.name / "data"
    make_writable_directory(out)
    console = make_console()
    log_to_console(make_console(stderr=True), only_progress=True)
    with report_imports():
        import transformers

        from torchmm.extensions.reports.inspection.findings import inspect_recipe
        from torchmm.extensions.reports.inspection.findings_table import (
            findings_table,
            length_lines,
            predict_corrupt_limit,
            rejected_lines,
        )
        from torchmm.extensions.reports.inspection.html_report import write_data_report

    transformers.logging.set_verbosity_error()
    findings = []
    read = inspect_recipe(recipe, options.limit, options.samples, decode=options.decode)
    for inspected in iterate_with_progress("reading the data", read, unit="sources"):
        findings.append(inspected)
        console.print(findings_table(inspected))
        for line in rejected_lines(inspected):
            console.out(line, highlight=False)
    for line in (predict_corrupt_limit(recipe, findings), *length_lines(recipe, findings)):
        console.out(line, highlight=False)
    page = out / "index.html"
    with report_progress("writing the report"):
        write_data_report(page, recipe, findings)
    console.out(f"wrote {page}", highlight=False)
    return 0
