"""Causal LMs without a registered family: the models that pass the proof, and detected errors."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
from counting import count_flops
from model_cases import LLMS, build, microbatch
from transformers import CONFIG_MAPPING

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.errors import ConfigError
from torchmm.costs.flops import microbatch_flops
from torchmm.extensions.auto_models import parity
from torchmm.extensions.auto_models.llms import small_llm_copy_config
from torchmm.extensions.auto_models.parity import compare_llm
from torchmm.models.build import LLM_FILES, build_model
from torchmm.models.families.introspection import layer_signature
from torchmm.models.layered import WeightFiles
from torchmm.models.layers import attention
from torchmm.models.llm import LlmModule
from torchmm.parallel.tensor.apply import tensor_problems
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

ROOT = Path(__file__).parents[4]
SIZES = {k: v for k, v in LLMS["llama"].items() if k != "model_type"}


def load_script():
    path = ROOT / "scripts" / "unlisted_models.py"
    spec = importlib.util.spec_from_file_location("unlisted_models", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def rejection(model_type: str, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        compare_llm(CONFIG_MAPPING[model_type](**settings), LLM_FILES)
    return "; ".join(caught.value.problems)


def test_unlisted_llm_trains_with_warning(caplog) -> None:
    caplog.set_level(logging.WARNING)
    parity._register_llm.cache_clear()
    config = ModelConfig(llm=LlmConfig(config={"model_type": "olmo", **SIZES}))
    model = build(config)
    model(microbatch([5, 9])).backward()
    assert all(p.grad is not None for p in model.parameters())
    (message,) = [
        record.message for record in caplog.records if "'olmo' is not registered" in record.message
    ]
    assert "Tensor parallelism was not compared" in message
    (problem,) = tensor_problems(model.llm, 2)
    assert "'llm' is not a registered model type" in problem
    caplog.clear()
    build_model(config, FreezeConfig())
    assert not caplog.records  # once per process


@pytest.mark.parametrize("model_type", ["gpt_neox", "persimmon"])
def test_modules_with_different_names_are_detected(model_type: str) -> None:
    """Check models whose embeddings, layers, norm and head have different names than in Llama."""
    assert compare_llm(CONFIG_MAPPING[model_type](), LLM_FILES).worst < 1e-5


def test_small_copy_has_every_layer_type() -> None:
    layer_types = ["full_attention" if i == 10 else "sliding_attention" for i in range(14)]
    config = CONFIG_MAPPING["olmo3"](num_hidden_layers=14, layer_types=layer_types)
    small = small_llm_copy_config(config)
    assert small.layer_types == layer_types[:11]
    assert (small.hidden_size, small.sliding_window) == (32, 4)
    late = ["full_attention" if i == 29 else "sliding_attention" for i in range(30)]
    config = CONFIG_MAPPING["olmo3"](num_hidden_layers=30, layer_types=late)
    with pytest.raises(ConfigError, match=r"24 layers does not contain .*full_attention"):
        small_llm_copy_config(config)


def test_layer_types_are_independent_of_sizes() -> None:
    family = compare_llm(CONFIG_MAPPING["olmo"](**SIZES), LLM_FILES).family
    layer_types = set()
    for size in (32, 64):
        config = CONFIG_MAPPING["olmo"](**{**SIZES, "hidden_size": size})
        with torch.device("meta"):
            model = LlmModule(config, family, torch.float32, LLM_FILES)
        layer_types |= {layer_signature(layer) for layer in model.layers}
    assert len(layer_types) == 1


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt2", "weights outside of embeddings, layers, one norm and head: wpe"),
        ("bert", "are not in the same module as its embeddings"),
        ("stablelm", "of samples packed, whole"),  # attention ignores the segments
        ("nanochat", ", one stage per layer"),  # normalizes the input of the first layer
        ("gemma3n_text", "altup_projections"),
        ("mamba", "num_attention_heads"),
    ],
)
def test_unproven_llm_is_rejected_with_reason(model_type: str, reason: str) -> None:
    assert reason in rejection(model_type)


def test_unsupported_llm_error_names_similar_type() -> None:
    config = ModelConfig(llm=LlmConfig(config={"model_type": "jamba"}))
    with pytest.raises(ConfigError) as caught:
        build_model(config, FreezeConfig())
    (problem,) = caught.value.problems
    assert "'jamba' is not registered" in problem
    assert "state-space (Mamba) layers" in problem
    assert "most similar registered type is" in problem


@pytest.mark.parametrize("broken", ["segments", "window"])
def test_proof_detects_errors_of_torchmm(broken: str, monkeypatch) -> None:
    right = attention._attend_segments

    def wrong(query, key, value, s, scale, rules):
        if broken == "segments":
            s = attention.Segments.from_starts([0, len(query)], query.device)
        elif rules.window:
            rules = rules._replace(window=rules.window + 1)
        return right(query, key, value, s, scale, rules)

    monkeypatch.setattr(attention, "_attend_segments", wrong)
    assert "comparisons with the Hugging Face model fail" in rejection("olmo3")


def test_proof_detects_wrong_gradient(monkeypatch) -> None:
    right = parity._unsplit_results

    def wrong(ours, batch):
        results = right(ours, batch)
        results["gradient of model.layers.1.mlp.up_proj.weight"] *= 1.0001
        return results

    monkeypatch.setattr(parity, "_unsplit_results", wrong)
    assert "gradient of model.layers.1.mlp.up_proj.weight of samples" in rejection("olmo")


def test_unreadable_weight_names_are_rejected_when_loading() -> None:
    config = CONFIG_MAPPING["minimax_m2"]()
    assert "missing for 'llm'" in compare_llm(config, LLM_FILES).unreadable
    parity.register_llm(config, LLM_FILES)
    with pytest.raises(ConfigError, match="its files cannot be read"):
        parity.register_llm(config, WeightFiles(**{**vars(LLM_FILES), "source": "somewhere"}))
    assert compare_llm(CONFIG_MAPPING["olmo"](), LLM_FILES).unreadable == ""


@pytest.mark.campaign
def test_survey_of_causal_lms_matches_documentation() -> None:
    """Check the list of supported models, and compare the FLOPs of the cost model with torch."""
    script = load_script()
    outcomes = script.compare_all(script.LLMS, script.causal_lms())
    page = (ROOT / "docs" / "reference" / "unlisted_models.md").read_text()
    assert (
        script.present_section(script.LLMS, page) == script.section(script.LLMS, outcomes).strip()
    )
    wrong = {}
    for name, outcome in outcomes.items():
        if outcome.parity:
            actual, counted = flops_of(name, outcome.parity.family)
            if abs(actual / counted - 1) > 0.01:
                wrong[name] = actual / counted
    # docs/reference/models.md explains these exceptions.
    fractions = {name: round(share, 2) for name, share in wrong.items()}
    assert fractions == {"jetmoe": 0.73, "mimo_v2_flash": 1.03, "moshi": 0.82}


def flops_of(model_type: str, family) -> tuple[float, float]:
    """Return the FLOPs of a forward pass by the cost model, and by the FLOP counter of torch."""
    llm = LlmModule(
        small_llm_copy_config(CONFIG_MAPPING[model_type]()), family, torch.float32, LLM_FILES
    )
    batch = microbatch([20, 33])
    counted, _ = count_flops(lambda: llm(batch, {}))
    meta = MicrobatchMeta((SampleMeta("s", 0, 20), SampleMeta("s", 1, 33)), 53)
    return microbatch_flops([llm.describe()], meta, batch.target_count)["llm"].forward, counted
