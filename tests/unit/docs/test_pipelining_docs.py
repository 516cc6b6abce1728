"""Tests of the example of pipeline_internals.md, and of the plot and times of pipelining.md."""

import importlib.util
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "concepts" / "pipelining.md").read_text()
INTERNALS = (ROOT / "docs" / "develop" / "pipeline_internals.md").read_text()


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_pipeline_example_runs(capsys):
    (code,) = blocks(INTERNALS, "python")
    names = {}
    exec(compile(code, "docs/develop/pipeline_internals.md", "exec"), names)
    ET.fromstring(names["svg"])
    assert len(names["records"]) == 3 * 2 * 2 + 3 * 2 * 2  # tasks x stages x (F, B), per module
    assert "warmup" in capsys.readouterr().out


def test_pipelining_plot_and_times_are_up_to_date(tmp_path, capsys):
    command = next(b for b in blocks(TEXT, "sh") if "scripts/draw.py" in b)
    arguments = shlex.split(command.replace("\\\n", " "))[2:]
    index = arguments.index("--out") + 1
    plot = ROOT / arguments[index]
    arguments[index] = str(tmp_path / "plot.svg")
    spec = importlib.util.spec_from_file_location("draw_script", ROOT / "scripts" / "draw.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(arguments) == 0
    stale = f"{plot.relative_to(ROOT)} is stale; run the command in docs/concepts/pipelining.md"
    assert (tmp_path / "plot.svg").read_text() == plot.read_text(), stale
    times = re.findall(r": (\S+) ms,", capsys.readouterr().out)
    caption = re.sub(r"\s+", " ", TEXT.split("```")[0])
    assert len(times) == 3 and all(f"{time} ms" in caption for time in times), times
