"""Tests of scripts/client_table.py, which writes results of other programs as a table."""

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "client_table.py"


def test_cells_list_results_in_order() -> None:
    script = runpy.run_path(str(SCRIPT))
    keys = ("family", "client", "version", "what")
    notes = [("llama", "vllm", "0.3", "tokens"), ("llama", "vllm", "0.3", "opens")]
    notes += [("llava", "trl", "1.2", "loss")]
    lines = list(script["lines"](json.dumps(dict(zip(keys, note, strict=True))) for note in notes))
    assert lines == [
        "| export of | vllm 0.3 | trl 1.2 |",
        "|---|---|---|",
        "| llama | opens, tokens |  |",
        "| llava |  | loss |",
    ]
    page = script["TARGET"].read_text()
    table = page.partition(script["BEGIN"])[2].partition(script["END"])[0]
    assert "| export of | transformers" in table
