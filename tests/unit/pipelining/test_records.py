"""Tests of recorded steps: saving and loading, and messages about damaged files."""

import json

import pytest

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.records import (
    StepContent,
    read_content,
    read_records,
    write_records,
)


def graph():
    stages = (
        StageSpec(0, "vision", 0, 2, (0, 1), segment=1, virtual_stage=3, trainable=False),
        StageSpec(1, "llm", 0, 2, (2,), tied_to=2),
        StageSpec(2, "llm", 2, 4, (3,), tied_to=1),
    )
    layout = StageLayout(stages, ((0, 1), (1, 2)), frozenset({"vision"}))
    return StageGraph(layout, 2, {"vision": (2, 0)}, {("vision", 0, 1): 1})


def test_all_actions_and_graph_survive_saving(tmp_path):
    file = tmp_path / "step-7.json"
    records = [
        ActionRecord(i % 4, Action(kind, i % 3, i, i % 2, i - 1, 2), i / 3, i / 3 + 1 / 7)
        for i, kind in enumerate(ActionType)
    ]
    write_records(file, records, graph())
    write_records(file, records, graph())  # replaces the file
    read, read_graph = read_records(file)
    assert read == records
    assert all(type(r.action) is Action and type(r.action.type) is ActionType for r in read)
    assert read_graph == graph()
    assert [p.name for p in tmp_path.iterdir()] == ["step-7.json"]


def test_step_content_survives_saving(tmp_path):
    images = (ImageMeta(640, 480, 96, 24), ImageMeta(64, 64, 32, 8, frames=2))
    generated = (GeneratedMeta((1, 4, 4), 12),)
    metas = (
        MicrobatchMeta((SampleMeta("a", 3, 50, images, "vision"), SampleMeta("b", 4, 9)), 64),
        MicrobatchMeta((SampleMeta("c", 0, 12, generated=generated),), 12),
    )
    content = StepContent(metas, (17, 11))
    file = tmp_path / "step-7.json"
    write_records(file, [], graph(), content)
    assert read_content(file) == content
    assert read_records(file) == ([], graph())
    write_records(file, [], graph())
    assert read_content(file) is None
    file.write_text(json.dumps({"content": [[1]]}))
    with pytest.raises(ValueError, match=r"step-7\.json: content"):
        read_content(file)


def test_empty_step_survives_saving(tmp_path):
    empty = StageGraph(StageLayout((StageSpec(0, "llm", 0, 1, (0,)),), ()), 0)
    write_records(tmp_path / "x.json", [], empty)
    assert read_records(tmp_path / "x.json") == ([], empty)


def test_non_finite_times_are_not_written(tmp_path):
    record = ActionRecord(0, Action(ActionType.F, 0, 0), 0.0, float("nan"))
    with pytest.raises(ValueError, match=r"0F0.*nan"):
        write_records(tmp_path / "x.json", [record], graph())
    assert not list(tmp_path.iterdir())


def change(content, key, value):
    return json.dumps({**content, key: value})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: json.dumps(c)[:-30], "char"),
        (lambda c: json.dumps([1]), "format"),
        (lambda c: change(c, "format", "another"), "format"),
        (lambda c: change(c, "columns", c["columns"][1:]), "columns"),
        (lambda c: change(c, "records", [[0, "F", 0]]), "3 values"),
        (lambda c: change(c, "records", [[0, "G", 0, 0, 0, 0, 0, 0, 1]]), "'G'"),
        (lambda c: change(c, "records", [[0, "F", "x", 0, 0, 0, 0, 0, 1]]), "requires integers"),
        (lambda c: change(c, "records", [[0, "F", 0, 0, 0, 0, 0, 0, None]]), "as times"),
        (lambda c: change(c, "edges", [[2, 1]]), "edge 2 -> 1"),
        (lambda c: json.dumps({k: v for k, v in c.items() if k != "stages"}), "no key 'stages'"),
    ],
)
def test_damaged_records_name_the_file(tmp_path, damage, words):
    file = tmp_path / "step-7.json"
    write_records(file, [ActionRecord(0, Action(ActionType.F, 0, 0), 0, 1)], graph())
    file.write_text(damage(json.loads(file.read_text())))
    with pytest.raises(ValueError, match=r"step-7\.json") as error:
        read_records(file)
    assert words in str(error.value)
