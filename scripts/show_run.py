"""Prints where the files of a finished run lie, how its loss went and what it wrote for images.

python scripts/show_run.py outputs/quickstart
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

LABELS = {
    "metrics.jsonl": "one line per step",
    "recipe.toml": "the resolved recipe",
    "loss.png": "loss curves",
    "captions.png": "held-out images with generated and true captions",
    "samples.json": "the same as text, over the whole run",
    "checkpoints": "to resume from",
    "hf": "Hugging Face export, loads with from_pretrained",
}


def main() -> int:
    """Shows the run directory named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    if not (run_dir / "metrics.jsonl").exists():
        print(f"{run_dir}: not a run directory (no metrics.jsonl)", file=sys.stderr)
        return 2
    console = Console()
    _show_captions(console, run_dir)
    _show_loss(console, run_dir)
    _show_files(console, run_dir)
    return 0


def _show_captions(console: Console, run_dir: Path) -> None:
    file = run_dir / "samples.json"
    samples = json.loads(file.read_text()) if file.exists() else []
    if not samples:
        return
    last = samples[-1]["step"]
    table = Table(title=f"Held-out images after step {last}", title_justify="left")
    table.add_column("the model wrote")
    table.add_column("the caption is")
    for sample in samples:
        if sample["step"] == last:
            table.add_row(sample["generated"], sample["truth"])
    console.print(table)


def _show_loss(console: Console, run_dir: Path) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = records[0], records[-1]
    console.print(
        f"loss {first['loss']:.3f} (step {first['step']}) -> {last['loss']:.3f} "
        f"(step {last['step']})"
    )
    validated = [r for r in records if r.get("validation_loss") is not None]
    if validated:
        losses = " -> ".join(f"{r['validation_loss']:.3f}" for r in validated)
        console.print(f"held-out loss {losses}")


def _show_files(console: Console, run_dir: Path) -> None:
    for name, meaning in LABELS.items():
        if (run_dir / name).exists():
            console.print(f"{run_dir / name!s:<36} {meaning}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
