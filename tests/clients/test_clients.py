"""Other programs open exports and reproduce the loss of a chat and the text after its question.

Programs run in a separate environment (`environment.sh`) and receive export directories and a chat.
Their answers are compared with those of the trained model before its export.
"""

from __future__ import annotations

import pytest
from client_cases import ADAPTED, CASES, SEEING, VLLM, Case, opened_tokenizer
from export_cards import CLASSES, NOT_RUN, make_card_case

pytestmark = pytest.mark.campaign
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def transformers_answers(ask, cases):
    return ask("with_transformers", list(cases.values()))


@pytest.fixture(scope="module")
def vllm_answers(ask, cases):
    return ask("with_vllm", [cases[name] for name in VLLM])


@pytest.fixture(scope="module")
def file_answers(ask, cases):
    return ask("with_files_alone", list(cases.values()))


@pytest.fixture(scope="module", params=[False, True], ids=["captions", "chats"])
def cards(request, ask, real_data, tmp_path_factory):
    """Return card cases of all classes and the texts that their examples print."""
    card_cases = {}
    for name in CLASSES:
        if name not in NOT_RUN:
            root = tmp_path_factory.mktemp("cards") / name.replace(" ", "_")
            root.mkdir()
            card_cases[name] = make_card_case(name, chats=request.param, data=real_data, root=root)
    return card_cases, ask("with_cards", list(card_cases.values()))


def answer(answers: dict, use: str, family: str) -> dict:
    result = answers["answers"][use][family]
    assert "error" not in result, result["error"]
    return result


def has_expected_loss(result: dict, case: Case) -> bool:
    return result["loss"] == pytest.approx(case.expected["loss"], rel=TOLERANCE)


@pytest.mark.parametrize("family", CASES)
def test_transformers_automatic_classes_reproduce_results(
    family: str, cases, transformers_answers, note
) -> None:
    case, version = cases[family], transformers_answers["versions"]["transformers"]
    result = answer(transformers_answers, "transformers", family)
    assert result["ids"] == case.expected["ids"]
    assert result["prompt_ids"] == case.expected["prompt_ids"]
    note(family, "transformers", version, "opens")
    assert has_expected_loss(result, case)
    note(family, "transformers", version, "loss")
    assert result["tokens"] == case.expected["tokens"]
    note(family, "transformers", version, "tokens")


@pytest.mark.parametrize("family", CASES)
def test_transformers_pipeline_generates_same_text(
    family: str, cases, transformers_answers, note
) -> None:
    case, version = cases[family], transformers_answers["versions"]["transformers"]
    result = answer(transformers_answers, "pipeline", family)
    tokenizer = opened_tokenizer(case.directory)
    written = tokenizer.decode(case.expected["tokens"], skip_special_tokens=True)
    note(family, "pipeline", version, "opens")
    assert result["text"] == written
    note(family, "pipeline", version, "tokens")


@pytest.mark.parametrize("family", CASES)
def test_trl_step_starts_from_same_loss(family: str, cases, transformers_answers, note) -> None:
    case, version = cases[family], transformers_answers["versions"]["trl"]
    result = answer(transformers_answers, "trl", family)
    assert result["moved"] > 10  # tensors that the step changed
    note(family, "trl", version, "opens")
    assert has_expected_loss(result, case)
    note(family, "trl", version, "loss")


@pytest.mark.parametrize("family", CASES)
def test_peft_adds_trainable_adapters_to_exports(
    family: str, cases, transformers_answers, note
) -> None:
    case, version = cases[family], transformers_answers["versions"]["peft"]
    result = answer(transformers_answers, "peft", family)
    assert result["learning"] == result["adapters"]
    layers, odd = divmod(result["adapters"], 4)  # two matrices, two linears in each
    assert layers in (2, 3) and not odd
    note(family, "peft", version, "opens")
    assert has_expected_loss(result, case)
    note(family, "peft", version, "loss")


@pytest.mark.parametrize("family", ADAPTED)
def test_peft_loads_exported_adapters(family: str, cases, transformers_answers, note) -> None:
    case, version = cases[family], transformers_answers["versions"]["peft"]
    result = answer(transformers_answers, "adapter", family)
    assert result["loss"] == pytest.approx(case.expected["adapter_loss"], rel=TOLERANCE)
    assert not has_expected_loss(result, case)
    note(family, "peft", version, "adapter")


@pytest.mark.parametrize("family", VLLM)
def test_vllm_generates_same_tokens(family: str, cases, vllm_answers, note) -> None:
    case, version = cases[family], vllm_answers["versions"]["vllm"]
    result = answer(vllm_answers, "vllm", family)
    assert result["prompt_ids"] == case.expected["prompt_ids"]
    note(family, "vllm", version, "opens")
    assert result["tokens"] == case.expected["tokens"]
    note(family, "vllm", version, "tokens")


@pytest.mark.parametrize("family", CASES)
def test_export_files_load_without_transformers(family: str, cases, file_answers, note) -> None:
    assert file_answers["loaded"] == []
    case, versions = cases[family], file_answers["versions"]
    result = answer(file_answers, "files", family)
    assert result["numbers"] and result["shapes"]
    assert sum(shape[0] == 1088 for shape in result["shapes"].values()) >= 1  # embeddings
    text = [t for t in case.expected["targets"] if t >= 0][:-1]  # without the end of the turn
    assert result["text_ids"] == text
    note(family, "safetensors, tokenizers", ", ".join(versions.values()), "opens")


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in NOT_RUN])
def test_card_example_prints_torchmm_text(name: str, cards) -> None:
    card_cases, answers = cards
    version = tuple(int(part) for part in answers["versions"]["transformers"].split(".")[:2])
    if version < (5, 21 if "omni" in name else 23 if name == "paligemma2" else 0):
        pytest.skip(
            "this version of transformers builds the model differently or does not cap its logits"
        )
    assert answer(answers, "cards", name.replace(" ", "_"))["text"] == card_cases[name].text


def test_comparison_detects_answers_of_another_model(cases, transformers_answers) -> None:
    result = answer(transformers_answers, "transformers", "llama")
    assert not has_expected_loss(result, cases["qwen3"])
    assert result["tokens"] != cases["qwen3"].expected["tokens"]
    assert set(SEEING) < set(cases)
