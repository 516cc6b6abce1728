"""The newest of something, handed over without waiting."""

from pathlib import Path

import numpy as np

from torchmm.common.files import Handover


def test_what_was_put_last_is_there_whole(tmp_path):
    giver, taker = Handover(tmp_path / "plan"), Handover(tmp_path / "plan")
    assert taker.get() is None
    for number in range(5):  # more than a pipe would hold, and nobody reads
        giver.put({"number": np.array(number), "values": np.full(100_000, number)})
    found = taker.get()
    assert found["number"] == 4
    assert found["values"].tolist() == [4] * 100_000
    assert taker.get()["number"] == 4  # it stays


def test_half_written_values_are_not_seen(tmp_path, monkeypatch):
    """Until a value is complete, the previous one is there."""
    giver, taker = Handover(tmp_path / "plan"), Handover(tmp_path / "plan")
    giver.put({"name": np.array("old")})
    seen, replace = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda *to: (seen.append(taker.get()), replace(*to)))
    giver.put({"name": np.array("new")})
    assert [str(found["name"]) for found in (*seen, taker.get())] == ["old", "new"]
