"""Other programs open our exports and get our numbers of them: loss of a chat with a picture, text
after its question.

Programs have an environment of their own (`environment.sh`), and get directories and a chat; what
they answer is compared with what the trained model gave before it was exported.
"""

from __future__ import annotations

import pytest
from client_cases import ADAPTED, CASES, SEEING, VLLM, Case, opened_tokenizer
from export_cards import CLASSES, NOT_RUN, make_card_case

pytestmark = pytest.mark.campaign
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def of_transformers(ask, cases):
    return ask("with_transformers", list(cases.values()))


@pytest.fixture(scope="module")
def of_vllm(ask, cases):
    return ask("with_vllm", [cases[name] for name in VLLM])


@pytest.fixture(scope="module")
def of_files(ask, cases):
    return ask("with_files_alone", list(cases.values()))


@pytest.fixture(scope="module", params=[False, True], ids=["captions", "chats"])
def cards(request, ask, real_data, tmp_path_factory):
    """Examples on cards of every class, and the texts that they print."""
    made = {}
    for name in CLASSES:
        if name not in NOT_RUN:
            root = tmp_path_factory.mktemp("cards") / name.replace(" ", "_")
            root.mkdir()
            made[name] = make_card_case(name, chats=request.param, data=real_data, root=root)
    return made, ask("with_cards", list(made.values()))


def answer(found: dict, use: str, family: str) -> dict:
    given = found["answers"][use][family]
    assert "error" not in given, given["error"]
    return given


def same_loss(given: dict, case: Case) -> bool:
    return given["loss"] == pytest.approx(case.expected["loss"], rel=TOLERANCE)


@pytest.mark.parametrize("family", CASES)
def test_transformers_opens_exports_by_its_automatic_classes(
    family: str, cases, of_transformers, note
) -> None:
    case, version = cases[family], of_transformers["versions"]["transformers"]
    given = answer(of_transformers, "transformers", family)
    assert given["ids"] == case.expected["ids"]
    assert given["prompt_ids"] == case.expected["prompt_ids"]
    note(family, "transformers", version, "opens")
    assert same_loss(given, case)
    note(family, "transformers", version, "loss")
    assert given["tokens"] == case.expected["tokens"]
    note(family, "transformers", version, "tokens")


@pytest.mark.parametrize("family", CASES)
def test_a_pipeline_writes_the_same_text(family: str, cases, of_transformers, note) -> None:
    case, version = cases[family], of_transformers["versions"]["transformers"]
    given = answer(of_transformers, "pipeline", family)
    tokenizer = opened_tokenizer(case.directory)
    written = tokenizer.decode(case.expected["tokens"], skip_special_tokens=True)
    note(family, "pipeline", version, "opens")
    assert given["text"] == written
    note(family, "pipeline", version, "tokens")


@pytest.mark.parametrize("family", CASES)
def test_trl_takes_a_step_from_the_same_loss(family: str, cases, of_transformers, note) -> None:
    case, version = cases[family], of_transformers["versions"]["trl"]
    given = answer(of_transformers, "trl", family)
    assert given["moved"] > 10  # tensors, by the step
    note(family, "trl", version, "opens")
    assert same_loss(given, case)
    note(family, "trl", version, "loss")


@pytest.mark.parametrize("family", CASES)
def test_peft_puts_adapters_on_exports(family: str, cases, of_transformers, note) -> None:
    case, version = cases[family], of_transformers["versions"]["peft"]
    given = answer(of_transformers, "peft", family)
    assert given["learning"] == given["adapters"]
    layers, odd = divmod(given["adapters"], 4)  # two matrices, two linears in each
    assert layers in (2, 3) and not odd
    note(family, "peft", version, "opens")
    assert same_loss(given, case)
    note(family, "peft", version, "loss")


@pytest.mark.parametrize("family", ADAPTED)
def test_peft_loads_adapters_that_a_run_exports(family: str, cases, of_transformers, note) -> None:
    case, version = cases[family], of_transformers["versions"]["peft"]
    given = answer(of_transformers, "adapter", family)
    assert given["loss"] == pytest.approx(case.expected["adapter_loss"], rel=TOLERANCE)
    assert not same_loss(given, case)
    note(family, "peft", version, "adapter")


@pytest.mark.parametrize("family", VLLM)
def test_vllm_writes_the_same_tokens(family: str, cases, of_vllm, note) -> None:
    case, version = cases[family], of_vllm["versions"]["vllm"]
    given = answer(of_vllm, "vllm", family)
    assert given["prompt_ids"] == case.expected["prompt_ids"]
    note(family, "vllm", version, "opens")
    assert given["tokens"] == case.expected["tokens"]
    note(family, "vllm", version, "tokens")


@pytest.mark.parametrize("family", CASES)
def test_files_are_read_without_transformers(family: str, cases, of_files, note) -> None:
    assert of_files["loaded"] == []
    case, versions = cases[family], of_files["versions"]
    given = answer(of_files, "files", family)
    assert given["numbers"] and given["shapes"]
    assert sum(shape[0] == 1088 for shape in given["shapes"].values()) >= 1  # embeddings
    text = [t for t in case.expected["targets"] if t >= 0][:-1]  # without the end of the turn
    assert given["text_ids"] == text
    note(family, "safetensors, tokenizers", ", ".join(versions.values()), "opens")


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in NOT_RUN])
def test_card_example_prints_torchmm_text(name: str, cards) -> None:
    made, found = cards
    version = tuple(int(part) for part in found["versions"]["transformers"].split(".")[:2])
    if version < (5, 21 if "omni" in name else 23 if name == "paligemma2" else 0):
        pytest.skip("Hugging Face's own was built in another way, or forgets the cap on its logits")
    assert answer(found, "cards", name.replace(" ", "_"))["text"] == made[name].text


def test_another_models_answers_are_noticed(cases, of_transformers) -> None:
    given = answer(of_transformers, "transformers", "llama")
    assert not same_loss(given, cases["qwen3"])
    assert given["tokens"] != cases["qwen3"].expected["tokens"]
    assert set(SEEING) < set(cases)
