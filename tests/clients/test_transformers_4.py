"""Transformers 4.57 opens exports and computes the logits of torchmm, or the card names a version.

The program runs in a separate environment (`environment_4.sh`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, ROOT
from transformers import AutoConfig, AutoTokenizer
from transformers_4_cases import NAMES, SCALED, make_case
from transformers_4_tokenizers import CLASSES, transformers_4_tokenizer
from word_tokenizer import tokenizer

from torchmm.models.hf.legacy_keys import LEGACY_VERSION, add_legacy_keys, describe_versions

__all__ = ["tokenizer"]
pytestmark = pytest.mark.campaign
TOLERANCE = 1e-5
SUPPORTED = f"Use transformers {LEGACY_VERSION}, or"
TEXTS = [
    "a cat on the mat",
    " <image>red",
    "<|im_start|>user\nwhat is it?<|im_end|>",
    "",
    "héllo  wörld",
]
MESSAGES = [{"role": "user", "content": "a cat"}]
OMNI = "qwen2_5_omni"
"""Model with equal logits that is not supported, because audio in videos was not compared."""


@pytest.fixture(scope="module")
def run_program(tmp_path_factory):
    """Return a function that runs the program of this environment on jobs."""
    process = subprocess.run(
        ["bash", str(HERE / "environment_4.sh")], capture_output=True, text=True, check=False
    )
    if process.returncode:
        pytest.skip(f"no environment with transformers 4: {process.stderr.strip()[-200:]}")

    def run(jobs: list[dict[str, Any]]) -> dict[str, Any]:
        directory = tmp_path_factory.mktemp("program")
        (directory / "jobs.json").write_text(json.dumps(jobs))
        program = HERE / "programs" / "with_transformers_4.py"
        files = [directory / "jobs.json", directory / "answers.json"]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [ROOT / ".clients_4/bin/python", program, *files],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert files[1].exists(), process.stderr[-3000:]
        result = json.loads(files[1].read_text())
        assert result["versions"]["transformers"].startswith(LEGACY_VERSION)
        return result["answers"]

    return run


@pytest.fixture(scope="module")
def exports(tmp_path_factory, run_program):
    """Return the directory and the answer of each export."""
    words = tokenizer.__wrapped__()
    root = tmp_path_factory.mktemp("exports")
    jobs = [make_case(name, root / str(i), words) for i, name in enumerate((*NAMES, *SCALED))]
    answers = run_program(jobs)
    return {job["family"]: (Path(job["directory"]), answers[job["family"]]) for job in jobs}


@pytest.mark.parametrize("name", [*NAMES, *SCALED])
def test_card_states_whether_logits_are_equal(name: str, exports) -> None:
    directory, answer = exports[name]
    is_equal = answer.get("error_of_logits", 1.0) < TOLERANCE
    is_supported = describe_versions(directory).startswith(SUPPORTED)
    assert is_supported == (is_equal and name != OMNI), (answer, describe_versions(directory))
    if is_supported:
        assert answer["missing_keys"] == answer["unexpected_keys"] == []


def test_export_without_legacy_keys_has_other_logits(
    exports, tmp_path: Path, run_program, tokenizer
) -> None:
    job = make_case("llm qwen3", tmp_path, tokenizer)
    config = Path(job["directory"]) / "config.json"
    settings = json.loads(config.read_text())
    del settings["rope_theta"]
    config.write_text(json.dumps(settings))
    (answer,) = run_program([job]).values()
    assert answer["error_of_logits"] > 1e-3
    assert describe_versions(config.parent).endswith("rope_parameters of qwen3.")
    assert exports["llm qwen3"][1]["error_of_logits"] < TOLERANCE


def test_tokenizers_return_equal_ids(tmp_path: Path, run_program) -> None:
    made = {
        f"{name} {adds_bos}": transformers_4_tokenizer(name, adds_bos)
        for name in ("PreTrainedTokenizerFast", *CLASSES)
        for adds_bos in (True, False)
    }
    jobs = []
    for i, (name, saved) in enumerate(made.items()):
        directory = tmp_path / str(i)
        AutoConfig.for_model("llama").save_pretrained(directory)
        saved.save_pretrained(directory)
        add_legacy_keys(directory, saved)
        job = {"family": name, "directory": str(directory), "texts": TEXTS, "messages": MESSAGES}
        jobs.append(job)
    answers = run_program(jobs)
    for job, (name, saved) in zip(jobs, made.items(), strict=True):
        expected = {
            "ids": [saved(text).input_ids for text in TEXTS],
            "special": sorted(saved.all_special_tokens),
            "eos": saved.eos_token_id,
            "length": len(saved),
            "rendered": saved.apply_chat_template(MESSAGES, tokenize=False),
        }
        assert answers[name] == expected, name
        reloaded = AutoTokenizer.from_pretrained(job["directory"])
        assert [reloaded(text).input_ids for text in TEXTS] == expected["ids"], name
