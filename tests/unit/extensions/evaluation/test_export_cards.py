"""The example on the card of an export generates the text that torchmm generates."""

import importlib.util

import pytest
from export_cards import CLASSES, NOT_RUN, CardCase, make_card_case, packages_of
from model_cases import COMPOSITES

from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.training.export.model_files import is_chat_model

QUICK = ("llama", "clip + llama", "paligemma2")
"""Classes of the quick suite. The campaign tests all remaining classes."""


def run_card(case: CardCase) -> str:
    values: dict = {}
    exec(case.code().replace("print(", "printed = ("), values)
    return values["printed"]


@pytest.mark.parametrize("chats", [False, True], ids=["captions", "chats"])
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.campaign) for name in CLASSES],
)
def test_card_example_generates_torchmm_text(name, chats, real_data, tmp_path):
    case = make_card_case(name, chats=chats, data=real_data, root=tmp_path)
    assert is_chat_model(case.directory) == chats
    if name in NOT_RUN:
        assert "```" not in case.use and "`torchmm generate`" in case.use
        assert NOT_RUN[name] in case.use
        return
    for package in packages_of(case):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the card requires {package}")
    assert run_card(case) == case.text
    assert case.text


def test_card_with_wrong_prompt_generates_different_text(real_data, tmp_path):
    case = make_card_case("clip + llama", chats=False, data=real_data, root=tmp_path)
    code = case.code().replace("<image>", "<image>A")
    assert code != case.code()
    values: dict = {}
    exec(code.replace("print(", "printed = ("), values)
    assert values["printed"] != case.text


def test_card_cases_cover_every_composite_class():
    assert {config["model_type"] for config in COMPOSITES.values()} == set(FAMILIES)
