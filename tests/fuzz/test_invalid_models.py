"""Wrong values and damaged files of models give models, or errors that name key or file."""

from collections import Counter

import pytest
from model_cases import COMPOSITES, ENCODERS, LLMS

from fuzz.broken_configs import draw_broken_model, judge_model
from fuzz.broken_files import damage_file, judge_file, save_model


@pytest.mark.parametrize(("seed", "draws"), [(1, 75), (2, 1000)])
@pytest.mark.timeout(1500)
def test_wrong_config_values_name_key(seed, draws):
    """A wrong value gives a model or an error that names the key."""
    verdicts: Counter[str] = Counter()
    unnamed = []
    for index in range(draws):
        draw = draw_broken_model(seed, index)
        verdict = judge_model(draw)
        verdicts[verdict] += 1
        unnamed += [f"{draw.name} {draw.changes}"] if verdict == "unnamed" else []
    assert not unnamed
    assert min(verdicts["built"], verdicts["rejected"]) > draws / 10


@pytest.mark.parametrize(("seed", "draws"), [(1, 60), (2, 700)])
@pytest.mark.timeout(1500)
def test_damaged_files_are_named(seed, draws, tmp_path):
    """A damaged file gives a model or an error that names the file."""
    save_model(tmp_path / "model")
    verdicts: Counter[str] = Counter()
    unnamed = []
    for index in range(draws):
        damage = damage_file(seed, index, tmp_path / "model", tmp_path / "damaged")
        verdict = judge_file(damage, tmp_path / "damaged")
        verdicts[verdict] += 1
        unnamed += [damage.name] if verdict == "unnamed" else []
    assert not unnamed
    assert min(verdicts["built"], verdicts["rejected"]) > draws / 20


def test_draws_cover_all_families():
    names = {draw_broken_model(1, index).name.split()[1] for index in range(1000)}
    assert names == {*LLMS, *ENCODERS, *COMPOSITES, "generator"}
