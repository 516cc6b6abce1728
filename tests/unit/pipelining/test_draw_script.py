"""Tests of `scripts/draw.py`: plots of schedules and recorded steps, and invalid arguments."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from installed import needs_extension

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.schedules.registry import ORDERS
from torchmm.pipelining.view.records import write_records

ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_script", ROOT / "scripts" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def draw(script, tmp_path, capsys):
    """Return a function that runs the script. It returns exit code, outputs and plotted actions."""

    def run(*arguments):
        out = tmp_path / "plot.svg"
        code = script.main([*map(str, arguments), "--out", str(out)])
        captured = capsys.readouterr()
        titles = ET.parse(out).getroot().iter(f"{SVG}title") if out.exists() else ()
        return code, captured.out, captured.err, [t.text.split()[0] for t in titles]

    return run


def test_every_schedule_is_plotted_completely(draw):
    for name in ORDERS:
        code, text, _, actions = draw("--schedule", name, "--stages", 2, "--images", "0,3,1,12")
        assert code == 0 and text.startswith(f"{name}: ")
        for kinds in ("F", "BI"):
            counts = Counter(
                int(re.split(f"[{kinds}]", a)[0]) for a in actions if set(kinds) & set(a)
            )
            assert len(counts) >= 3 and counts[0] == 0 + 1 + 1 + 3 and counts[max(counts)] == 4


@needs_extension("balance")
def test_colocated_encoders_are_plotted_in_bubbles(draw):
    step = ("--stages", 4, "--images", "0,3,1,7,0,2,5,1", "--layers", "vision=8,llm=16")
    code, text, _, actions = draw("--schedule", "megatron_balanced", "optimus:coarse", "optimus",
                                  *step, "--encoder-stages", 2)  # fmt: skip
    assert code == 0
    balanced, coarse, fine = (float(line.split()[1]) for line in text.splitlines()[:3])
    assert fine <= coarse < balanced
    assert {int(a.split("F")[0]) for a in actions if "F" in a} >= set(
        range(8)
    )  # stages of one layer
    code, _, problem, _ = draw("--schedule", "optimus:finest", *step)
    assert code == 2 and "optimus:finest" in problem
    code, _, problem, _ = draw("--schedule", "optimus", *step, "--encoder-stages", 3)
    assert code == 2 and "divisor of 4" in problem


@pytest.mark.parametrize("name", ["1f1b", "separated", "interleaved_1f1b"])
def test_disaggregated_modules_are_plotted(draw, name):
    stages = "2" if name == "interleaved_1f1b" else "1"
    options = ["--units", "vision=1x3,llm=2x2", "--images", "1,2,0,4", "--virtual-stages", stages]
    code, text, _, actions = draw("--schedule", name, *options)
    assert code == 0 and text.startswith(f"{name}: ")
    forwards = [action for action in actions if "F" in action]
    assert len(forwards) == 3 + 4 * 2 * int(stages)  # three microbatches have images


def test_plotted_makespan_follows_durations(draw):
    llm = ("--schedule", "1f1b", "--stages", 2, "--microbatches", 3, "--layers", "llm=8")
    assert "1f1b: 48 ms" in draw(*llm)[1]  # (3 + 1) x (4 + 8)
    slower = draw(*llm, "--layer-ms", "llm=0.5", "--transfer-ms", 1)[1]
    assert "1f1b: 28 ms" in slower  # half of it, and four exposed transfers
    # Images 5 and 2 in sub-microbatches of at most 3: 3, 2 and 2 ms. The LLM takes 2 x 1 ms.
    both = ("--schedule", "separated", "--stages", 1, "--images", "5,2",
            "--sub-microbatch-images", 3, "--layers", "vision=1,llm=1")  # fmt: skip
    _, text, _, actions = draw(*both)
    assert "separated: 27 ms, bubbles 0.0 %" in text
    assert sorted(a for a in actions if a.startswith("0F")) == ["0F0", "0F0.1", "0F1"]
    _, text, _, actions = draw(*both, "--freeze", "vision,llm")
    assert "separated: 9 ms" in text and not [a for a in actions if "B" in a]


def test_order_survives_csv_and_trace(draw, tmp_path):
    options = ("--stages", 2, "--images", "1,0,6")
    csv, trace = tmp_path / "order.csv", tmp_path / "trace.json"
    _, text, _, actions = draw("--schedule", "separated", *options, "--csv", csv, "--trace", trace)
    code, again, _, same = draw("--schedule", f"csv:{csv}", *options)
    assert code == 0 and same == actions
    assert again.split(": ")[1] == text.split(": ")[1]
    events = json.loads(trace.read_text())["traceEvents"]
    assert sorted(e["name"] for e in events if e["ph"] == "X") == sorted(actions)


def test_recorded_steps_are_plotted_first(draw, tmp_path):
    file = tmp_path / "step-3.json"
    graph = StageGraph(StageLayout((StageSpec(0, "llm", 0, 1, (0,)),), ()), 1)
    write_records(file, [ActionRecord(0, Action(ActionType.F, 0, 0), 1.0, 4.0)], graph)
    code, text, _, actions = draw("--records", file, "--schedule", "gpipe", "--stages", 1)
    assert code == 0 and actions[0] == "0F0" and len(actions) == 1 + 16
    assert text.splitlines()[0] == f"{file}: 4 ms, bubbles 25.0 %"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--schedule or --records"),
        (["--schedule", "fast"], "unknown schedule 'fast'"),
        (["--schedule", "1f1b", "--stages", "40"], "40 pipeline ranks"),
        (["--schedule", "1f1b", "--microbatches", "0"], "at least 1"),
        (["--schedule", "1f1b", "--microbatches", "3", "--images", "1,2"], "--microbatches 3"),
        (["--schedule", "1f1b", "--layers", "vision=8,llm=8"], "--images"),
        (["--schedule", "1f1b", "--layers", "llm=8", "--images", "1"], "--images"),
        (["--schedule", "1f1b", "--freeze", "audio"], "unknown module audio"),
        (["--schedule", "1f1b", "--transfer-ms", "-1"], "transfer_ms = -1.0"),
        (
            ["--schedule", "1f1b", "gpipe", "--trace", "x"],
            "--trace requires one step, but 2 are selected",
        ),
        (
            ["--schedule", "1f1b", "gpipe", "--csv", "x"],
            "--csv requires one step, but 2 are selected",
        ),
        (["--schedule", "csv:/nowhere"], "/nowhere"),
        (["--records", "/nowhere"], "/nowhere"),
        (["--records", str(ROOT / "pyproject.toml")], "not a recorded step"),
    ],
)
def test_invalid_draw_arguments_print_an_error(draw, arguments, words):
    code, _, error, actions = draw(*arguments)
    assert code == 2 and words in error and not actions
