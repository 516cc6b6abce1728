"""Initial values: complete, equal to Hugging Face, and determined by seed and name."""

import copy
import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from model_cases import COMPOSITES, ENCODERS, LLMS, composite_config, pair_config
from torch import nn

from torchmm.models import initialize
from torchmm.models.build import build_model
from torchmm.models.initialize import build_random_copy, init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.recipe.model_section import FreezeConfig, ModelConfig


def fresh(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> MultimodalModel:
    model = build_model(config, FreezeConfig(), dtype)
    materialize(model, "cpu")
    for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else -1)
    init_weights(model, seed)
    return model


CONFIGS = {
    **{f"{llm}+clip": pair_config(llm, "clip") for llm in LLMS},
    **{f"llama+{encoder}": pair_config("llama", encoder) for encoder in ENCODERS},
    **{name: composite_config(name) for name in COMPOSITES},
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_all_tensors_are_initialized(name: str) -> None:
    model = fresh(CONFIGS[name], seed=0)
    for fqn, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.isfinite().all(), fqn
        assert tensor.is_floating_point() or (tensor >= 0).all(), fqn


def test_computed_buffers_match_hugging_face() -> None:
    model = fresh(pair_config("llama", "clip"), seed=0)
    with torch.device("cpu"):
        full = model.llm.rebuild()
    theirs = dict(full.named_buffers())
    assert theirs
    for name, buffer in model.llm.named_buffers():
        assert torch.equal(buffer, theirs[name]), name


def test_initial_values_depend_on_seed_and_layer() -> None:
    config = pair_config("llama", "clip")
    one, same, other = (fresh(config, seed) for seed in (1, 1, 2))
    name = "llm.backbone.model.layers.{}.mlp.up_proj.weight"
    first = one.get_parameter(name.format(0))
    assert torch.equal(first, same.get_parameter(name.format(0)))
    assert not torch.equal(first, other.get_parameter(name.format(0)))
    assert not torch.equal(first, one.get_parameter(name.format(1)))


def test_initial_scale_follows_config() -> None:
    model = fresh(pair_config("llama", "siglip"), seed=0)
    head = model.llm.get_parameter("backbone.lm_head.weight").detach()
    assert head.std().item() == pytest.approx(0.02, rel=0.1)
    assert (model.llm.get_parameter("backbone.model.norm.weight") == 1).all()


def test_initialization_preserves_global_rng_state() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    fresh(pair_config("llama", "clip"), seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_local_generator_samples_as_after_manual_seed() -> None:
    def sample() -> list[torch.Tensor]:
        values = torch.rand(3, dtype=torch.float64)
        dropped = torch.ops.aten.native_dropout(torch.ones(8), p=0.5, train=True)[0]
        return [values, dropped, torch.empty(3).normal_(mean=2.0)]

    torch.manual_seed(3)
    expected = sample()
    torch.manual_seed(4)
    with initialize._LocalGeneratorMode(3):
        drawn = sample()
    assert all(map(torch.equal, drawn, expected))
    assert [tensor.dtype for tensor in drawn] == [torch.float64, torch.float32, torch.float32]


def test_ties_survive_materialization() -> None:
    model = fresh(pair_config("llama_tied", "clip"), seed=0)
    head = model.llm.get_parameter("backbone.lm_head.weight")
    assert head is model.llm.get_parameter("backbone.model.embed_tokens.weight")


def test_parameters_have_requested_dtype() -> None:
    model = fresh(composite_config("llava"), seed=0, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


class _Owner:
    """A family with one operator that does not accept a generator."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            module.bias.copy_(torch.randn(len(module.bias)))


def test_threads_generate_values_of_one_seeded_generator() -> None:
    """Check as many layers at once as threads, compared with the global generator of torch."""
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    keys = [f"layer {i}" for i in range(12)]
    with ThreadPoolExecutor(4) as threads:
        copies = list(threads.map(lambda key: build_random_copy(layer, _Owner(), key), keys))
    for key, actual in zip(keys, copies, strict=True):
        expected = copy.deepcopy(layer).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
            for linear in expected:
                _Owner()._init_weights(linear)
        for name, value in expected.named_parameters():
            assert torch.equal(actual.get_parameter(name), value), f"{key}: {name}"


@pytest.mark.parametrize("most_bytes", [1, 2**32])
def test_error_of_layer_initialization_is_raised(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialize, "MAX_PARALLEL_BYTES", most_bytes)
    model = build_model(pair_config("llama", "clip"), FreezeConfig())
    materialize(model, "cpu")
    monkeypatch.setattr(type(model.llm.hf), "_init_weights", lambda self, module: None)
    with pytest.raises(AssertionError, match="does not initialize"):
        init_weights(model, seed=0)
