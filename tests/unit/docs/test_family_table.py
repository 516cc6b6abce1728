"""Tests of scripts/family_table.py, which writes test results as tables without empty columns."""

import json
import runpy
from pathlib import Path

import pytest
from model_cases import COMPOSITES
from transformers import AutoConfig

from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES

SCRIPT = Path(__file__).parents[3] / "scripts" / "family_table.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def proofs_in(directory, *proofs):
    keys = ("model_type", "what", "transformers")
    files = []
    for number, proof in enumerate(proofs):
        files.append(directory / f"{number}.jsonl")
        files[-1].write_text(json.dumps(dict(zip(keys, proof, strict=True))) + "\n")
    return files


def test_empty_columns_are_omitted(script, tmp_path):
    proofs = [("llama", "equal", "5.9.0"), ("clip_vision_model", "flops", "5.10.1")]
    lines = list(script["lines"](script["read_results"](proofs_in(tmp_path, *proofs))))
    heads = [line for line in lines if "exported as |" in line]
    assert heads[0] == "| LLMs | parity | exported as | transformers |"
    assert "| llama | yes | LlamaForCausalLM | 5.9.0 |" in lines
    assert heads[1] == "| Encoders | FLOPs | exported as |"
    assert "| clip_vision_model | yes | LlavaForConditionalGeneration |" in lines
    assert "| pixtral |  | PixtralVisionModel |" in lines
    assert heads[2] == "| Multimodal models | images | tiles | videos | audio | exported as |"
    assert "| qwen2_audio | - | - | - |  | Qwen2AudioForConditionalGeneration |" in lines


def test_keep_reads_results_of_the_page(script, tmp_path):
    proofs = [("llama", "equal", "5.9.0"), ("llava", "equal", "5.9.0"), ("llava", "files", "5.9.0")]
    proofs += [("clip_vision_model", "flops", "5.10.1"), ("llava", "equal", "5.10.1")]
    results = script["read_results"](proofs_in(tmp_path, *proofs))
    results_of_page = dict(script["parse_rows"]("\n".join(script["lines"](results))))
    assert {name: proofs for name, proofs in results_of_page.items() if proofs.what} == results
    assert results_of_page["llava"].versions == {"5.9.0", "5.10.1"}


def test_tiles_and_videos_match_the_families(script):
    for config in COMPOSITES.values():
        name = config["model_type"]
        if name.endswith("_thinker"):  # missing in some versions of transformers
            continue
        parts = FAMILIES[name].get_components(AutoConfig.for_model(**config))
        has_tiles = any(part.tiling is not None for part in parts.encoders.values())
        assert has_tiles == (name in script["TILED"]), name
        assert parts.text.mrope == (name in script["TIMED"]), name
