"""Multimodal models equal those of Hugging Face: losses, gradients, freezing, missing images."""

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from model_cases import (
    COMPOSITES,
    ENCODERS,
    IMAGE_TOKEN_ID,
    LLMS,
    SPEECH,
    build,
    composite_config,
    microbatch,
    pair_config,
    relative_error,
    worst_gradient,
)
from proofs import proves
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, ImageSpec, Microbatch
from torchmm.common.errors import ConfigError
from torchmm.common.tiles import TileRegion
from torchmm.models.families.composites.registry import COMPOSITES as COMPOSITE_KINDS
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.layers.attention import image_blocks, prompt_blocks
from torchmm.models.layers.kv_cache import extend_prompt
from torchmm.models.multimodal import MultimodalModel, module_of
from torchmm.recipe.model_section import EncoderConfig, LlmConfig, ModelConfig

ROWS = ("mistral3", "pixtral_llava")
"""Models whose images are rectangles of patches of any size."""
SQUARE = {"height": 16, "width": 16}
version = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def hf_weight_name(model: MultimodalModel, fqn: str) -> str:
    for prefix, module in model.named_modality_modules():
        if fqn.startswith(f"{prefix}."):
            name = hf_name(hf_prefixes(model), module.name, fqn.removeprefix(f"{prefix}."))
            assert name is not None
            return name
    raise AssertionError(fqn)


def hf_model(model: MultimodalModel) -> PreTrainedModel:
    """Return the multimodal Hugging Face model with equal weights and eager attention."""
    assert model.composite is not None
    kind = COMPOSITE_KINDS[model.composite.model_type].kind
    plain = kind._from_config(model.composite, attn_implementation="eager")
    weights = {hf_weight_name(model, name): value for name, value in model.state_dict().items()}
    missing = plain.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    unused = {name for m in model.modality_modules() for name in m.unused}
    assert len(missing.missing_keys) == len(unused)
    plain.tie_weights()
    return plain


def two_images(
    name: str, generator: torch.Generator
) -> tuple[list[tuple[int, int, int]], Tensor, list[int]]:
    """Return the grid, the pixels or patches, and the token count of each image."""
    if name.startswith(("qwen", "glm")):
        return [(1, 4, 6), (1, 6, 2)], torch.randn(36, 96, generator=generator), [6, 3]
    if name == "gemma4":
        return [(1, 4, 6), (1, 6, 2)], torch.randn(36, 48, generator=generator), [6, 3]
    if name in ROWS:
        tokens = [4, 2] if name == "mistral3" else [16, 8]
        return [(1, 4, 4), (1, 2, 4)], torch.randn(24, 48, generator=generator), tokens
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    unmerged = name in ("llava", "paligemma", "paligemma2")
    return [(1, 4, 4), (1, 4, 4)], pixels, [16, 16] if unmerged else [4, 4]


def two_samples_with_images(name: str) -> tuple[Microbatch, list[dict]]:
    """Return a packed microbatch, and inputs of the Hugging Face model for each sample."""
    generator = torch.Generator().manual_seed(5)
    has_grids = name.startswith(("qwen", "glm"))
    grids, pixels, tokens = two_images(name, generator)
    retained = None
    if name.startswith("llava_"):
        retained = [TileRegion(0, 4, 0, 4, line_ends=1)] * 2
        tokens = [17, 17]
    starts, lengths = [4, 4 + tokens[0] + 9], [4 + tokens[0] + 5, 4 + tokens[1] + 8]
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, tokens, strict=True)])
    images = {"vision": EncoderInputs(pixels, grids, positions, retained)}
    # Images of PaliGemma are in the prompt, before the first target.
    ignored = 4 + tokens[0] + 2 if name.startswith("paligemma") else 2
    batch = microbatch(lengths, images, positions, ignored)
    pixels_per_image = pixels.split([24, 12] if len(pixels) == 36 else len(pixels) // 2)
    samples = []
    for i, (start, stop) in enumerate([(0, lengths[0]), (lengths[0], sum(lengths))]):
        ids = batch.input_ids_T[None, start:stop]
        targets = batch.targets_T[None, start:stop]
        sample = {"input_ids": ids, "pixel_values": pixels_per_image[i], "use_cache": False}
        if has_grids:
            sample["image_grid_thw"] = torch.tensor([grids[i]])
        elif name == "gemma4":
            _, rows, columns = grids[i]
            positions = [[column, row] for row in range(rows) for column in range(columns)]
            sample["image_position_ids"] = torch.tensor([positions])
            sample["pixel_values"] = pixels_per_image[i][None]
        elif name in ROWS:
            _, rows, columns = grids[i]
            image = pixels.split([16, 8])[i].view(rows, columns, 3, 4, 4).permute(2, 0, 3, 1, 4)
            sample["pixel_values"] = image.reshape(1, 3, 4 * rows, 4 * columns)
            sample["image_sizes"] = torch.tensor([[4 * rows, 4 * columns]])
        elif name in ("idefics3", "smolvlm"):
            sample["pixel_values"] = pixels_per_image[i][None]
        samples.append(sample | token_types(name, ids, targets))
    return batch, samples


def token_types(name: str, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the token types that the Hugging Face model requires for a sample."""
    is_image = (ids == IMAGE_TOKEN_ID).int()
    if name.startswith(("qwen", "glm")) or name == "gemma4":
        return {"mm_token_type_ids": is_image}
    if name == "gemma3":
        return {"token_type_ids": is_image}
    if name.startswith("paligemma"):
        is_answer = torch.roll(targets != IGNORE_TARGET, 1).cumsum(1) > 0
        return {"token_type_ids": is_answer.int()}
    return {}


def first_sample(batch: Microbatch) -> Microbatch:
    """Return the first sample as a separate microbatch."""
    length = batch.cu_seqlens[1]
    return replace(
        batch,
        input_ids_T=batch.input_ids_T[:length],
        targets_T=batch.targets_T[:length],
        target_positions_L=None,
        position_ids=batch.position_ids[..., :length],
        cu_seqlens=[0, length],
        encoders={"vision": batch.encoders["vision"].select(range(1))},
    )


def mrope_positions(plain: PreTrainedModel, samples: list[dict]) -> Tensor:
    positions = [
        plain.model.get_rope_index(
            s["input_ids"],
            image_grid_thw=s["image_grid_thw"],
            mm_token_type_ids=s["mm_token_type_ids"],
        )[0][:, 0]
        for s in samples
    ]
    return torch.cat(positions, dim=1)


@proves("equal", COMPOSITES)
@proves("packed", COMPOSITES)
@proves("images", COMPOSITES)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llava", {"vision_feature_layer": -2}),
        ("llava", {"vision_feature_layer": 3, "vision_feature_select_strategy": "default"}),
        ("llava", {"tie_word_embeddings": True, "projector_hidden_act": "relu"}),
        ("internvl", {}),
        ("internvl", {"vision_feature_layer": -2, "tie_word_embeddings": False}),
        ("internvl_qwen3", {}),
        ("internvl_qwen3_moe", {}),
        ("idefics3", {}),
        ("smolvlm", {}),
        ("paligemma", {}),
        pytest.param(
            "paligemma2",
            {},
            marks=pytest.mark.skipif(
                version < (5, 23), reason="Hugging Face does not apply the logit cap"
            ),
        ),
        ("gemma3", {}),
        ("gemma4", {}),
        ("mistral3", {}),
        ("mistral3", {"text_config": LLMS["ministral3"]}),
        ("pixtral_llava", {}),
        ("pixtral_llava", {"vision_feature_layer": -2}),
        ("qwen2_vl", {}),
        ("qwen2_5_vl", {}),
        ("qwen2_5_vl", {"tie_word_embeddings": True}),
        ("qwen3_vl", {}),
        ("qwen3_vl", {"tie_word_embeddings": True}),
        ("qwen3_vl_moe", {}),
        ("qwen3_5", {}),
        ("qwen3_5_moe", {}),
        ("glm4v", {}),
        ("glm4v_moe", {}),
        ("glm46v", {}),
    ],
)
def test_multimodal_model_matches_hugging_face(name: str, changes: dict) -> None:
    model = build(composite_config(name, **changes))
    plain = hf_model(model)
    batch, samples = two_samples_with_images(name)
    if model.text.mrope:
        batch.position_ids = mrope_positions(plain, samples)
    theirs = [plain(**sample).logits[0] for sample in samples]
    for sample_batch, logits in ((batch, torch.cat(theirs)), (first_sample(batch), theirs[0])):
        expected = functional.cross_entropy(logits, sample_batch.targets_T, reduction="sum")
        loss, all_positions = model(sample_batch), torch.arange(len(logits))
        assert relative_error(loss, expected) < 1e-5
        assert (
            relative_error(
                model.llm.logits(sample_batch, model.encode(sample_batch), all_positions), logits
            )
            < 1e-5
        )
        model.zero_grad()
        plain.zero_grad()
        loss.backward()
        expected.backward(retain_graph=True)
        assert worst_gradient(model, plain, lambda fqn: hf_weight_name(model, fqn)) < 1e-5


@proves("text", COMPOSITES)
@pytest.mark.parametrize("name", list(COMPOSITES))
def test_text_only_batch_matches_hugging_face(name: str) -> None:
    if version < (5, 21 if "omni" in name else 23 if name == "paligemma2" else 0):
        pytest.skip("this version of Hugging Face has different modules or no logit cap")
    model = build(composite_config(name))
    plain = hf_model(model)
    batch = microbatch([9, 14])
    if model.text.mrope:
        batch.position_ids = batch.position_ids.expand(3, -1)
    theirs = []
    for start, stop in pairwise(batch.cu_seqlens):
        ids, targets = batch.input_ids_T[None, start:stop], batch.targets_T[None, start:stop]
        sample = {"input_ids": ids, "use_cache": False}
        if "omni" not in name and name not in SPEECH:
            sample |= token_types(name, ids, targets)
        theirs.append(plain(**sample).logits[0])
    expected = functional.cross_entropy(torch.cat(theirs), batch.targets_T, reduction="sum")
    loss = model(batch)
    assert relative_error(loss, expected) < 1e-5
    loss.backward()
    expected.backward()
    rename = partial(hf_weight_name, model)
    assert worst_gradient(model.llm, plain, lambda fqn: rename(f"llm.{fqn}")) < 1e-5
    encoder_grads = [p.grad for module in model.encoder_modules() for p in module.parameters()]
    assert not any(grad is not None and grad.any() for grad in encoder_grads)


def test_blocks_end_with_images_prompts_and_samples() -> None:
    images = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    assert image_blocks(images, [0, 5, 8]).tolist() == [-1, 0, 0, -1, 1, 2, 2, -1]
    targets = torch.tensor([0, 0, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
    assert prompt_blocks(targets, [0, 5, 8]).tolist() == [0, 0, 0, -1, -1, 1, -1, -1]


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_causal_attention_for_images_changes_loss(name: str) -> None:
    model = build(composite_config(name))
    batch, _ = two_samples_with_images(name)
    loss = model(batch)
    model.llm.family = replace(model.llm.family, bidirectional=None)
    assert relative_error(model(batch), loss) > 1e-4


def consecutive_sections(frequencies: Tensor) -> Tensor:
    """Return frequencies with consecutive sections of 4 time, 2 row and 2 column values."""
    time, rows, columns = frequencies
    joined = torch.cat([time[..., :4], rows[..., 4:6], columns[..., 6:]], dim=-1)
    return torch.cat([joined, joined], dim=-1)


def test_glm_with_unsupported_modules_is_rejected() -> None:
    text = COMPOSITES["glm4v_moe"]["text_config"]
    with pytest.raises(ConfigError, match="glm4v_moe_text' is not supported; use glm4v_t"):
        build(composite_config("glm46v", text_config={**text, "model_type": "glm4v_moe_text"}))
    vision = COMPOSITES["glm4v"]["vision_config"]
    with pytest.raises(ConfigError, match="out_hidden_size = 64 differs"):
        build(composite_config("glm4v", vision_config={**vision, "out_hidden_size": 64}))


@pytest.mark.parametrize("name", ["glm4v", "glm4v_moe"])
def test_glm_encoder_and_position_errors_change_logits(name: str) -> None:
    model = build(composite_config(name))
    batch, samples = two_samples_with_images(name)
    batch.position_ids = mrope_positions(hf_model(model), samples)
    all_positions = torch.arange(len(batch.input_ids_T))
    encoder = model.encoders["vision"]

    def logits() -> Tensor:
        with torch.no_grad():
            return model.llm.logits(batch, model.encode(batch), all_positions)

    right = logits()

    def error() -> float:
        return relative_error(logits(), right)

    rows = batch.position_ids
    batch.position_ids = rows[[0, 2, 1]]
    assert error() > 1e-4, "row and column sections are swapped"
    batch.position_ids = rows
    encoder.tower.embeddings.interpolated_method = "bilinear"
    assert error() > 1e-5, "learned positions use bilinear resizing"
    encoder.tower.embeddings.interpolated_method = "bicubic"
    norm = encoder.connector.post_layernorm
    encoder.connector.post_layernorm = torch.nn.Identity()
    assert error() > 1e-4, "the norm after the layers is missing"
    encoder.connector.post_layernorm = norm
    weight = encoder.connector.downsample.weight.data
    encoder.connector.downsample.weight.data = weight.transpose(2, 3).contiguous()
    assert error() > 1e-4, "rows and columns of merged patches are swapped"
    encoder.connector.downsample.weight.data = weight
    assert error() == 0


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_deepstack_and_position_errors_change_logits(name: str) -> None:
    model = build(composite_config(name))
    batch, samples = two_samples_with_images(name)
    batch.position_ids = mrope_positions(hf_model(model), samples)
    all_positions = torch.arange(len(batch.input_ids_T))
    family, llm, tower = model.llm.family, model.llm, model.encoders["vision"].tower

    def logits() -> Tensor:
        with torch.no_grad():
            return llm.logits(batch, model.encode(batch), all_positions)

    right = logits()

    def error() -> float:
        return relative_error(logits(), right)

    llm.family = replace(family, deepstack_layers=0)
    assert error() > 1e-4, "deepstack features are missing"
    llm.family = family
    encoder = model.encoders["vision"]
    encoder.deepstack_layers = (0, 2)
    assert error() > 1e-5, "a different layer is used"
    encoder.deepstack_layers = (0, 1)
    mergers = encoder.connector.deepstack_merger_list
    mergers[0], mergers[1] = mergers[1], mergers[0]
    assert error() > 1e-5, "mergers are swapped"
    mergers[0], mergers[1] = mergers[1], mergers[0]
    rows = batch.position_ids
    batch.position_ids = rows[[0, 2, 1]]
    assert error() > 1e-4, "row and column sections are swapped"
    batch.position_ids = rows
    rotary = llm.text_model.rotary_emb
    interleaved = rotary.recomposition_frequencies
    rotary.recomposition_frequencies = consecutive_sections
    assert error() > 1e-4, "sections are consecutive, as in Qwen2-VL"
    rotary.recomposition_frequencies = interleaved
    tower.interpolation_align_corners = False
    assert error() > 1e-5, "learned positions are interpolated differently"
    tower.interpolation_align_corners = True
    assert error() == 0


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"])
def test_swapped_position_sections_change_loss(name: str) -> None:
    """Check rows instead of columns. The tests above check the remaining models with sections."""
    model = build(composite_config(name))
    batch, samples = two_samples_with_images(name)
    batch.position_ids = mrope_positions(hf_model(model), samples)
    with torch.no_grad():
        right = model(batch)
        batch.position_ids = batch.position_ids[[0, 2, 1]]
        assert relative_error(model(batch), right) > 1e-5


def test_invalid_deepstack_layers_are_rejected() -> None:
    vision = COMPOSITES["qwen3_vl"]["vision_config"]
    changes = {"vision_config": {**vision, "deepstack_visual_indexes": [1, 0]}}
    with pytest.raises(
        ConfigError, match=r"deepstack_visual_indexes = \[1, 0\] must be increasing"
    ):
        build(composite_config("qwen3_vl", **changes))
    text = {**COMPOSITES["qwen3_vl"]["text_config"], "num_hidden_layers": 1}
    with pytest.raises(ConfigError, match="more entries than the 1 layers of the LLM"):
        build(composite_config("qwen3_vl", text_config=text))
    wider = {"vision_config": {**vision, "out_hidden_size": 64}}
    with pytest.raises(ConfigError, match="out_hidden_size = 64 differs"):
        build(composite_config("qwen3_vl", **wider))


def test_generated_tokens_are_not_in_prompt_block() -> None:
    model = build(composite_config("paligemma"))
    batch, _ = two_samples_with_images("paligemma")
    assert model.llm.family.bidirectional == "prompts"
    start = batch.cu_seqlens[1]
    length = int((batch.targets_T[:start] != IGNORE_TARGET).nonzero()[0]) + 1
    prompt = replace(
        first_sample(batch),
        input_ids_T=batch.input_ids_T[:length],
        targets_T=torch.full((length,), IGNORE_TARGET),
        target_positions_L=None,
        position_ids=batch.position_ids[:length],
        cu_seqlens=[0, length],
    )
    state = prompt
    for token in batch.input_ids_T[length:start]:
        state = extend_prompt(state, token[None])
    assert torch.equal(state.input_ids_T, batch.input_ids_T[:start])
    blocks = prompt_blocks(state.targets_T != IGNORE_TARGET, state.cu_seqlens)
    assert blocks.tolist() == [0] * length + [-1] * (start - length)


def test_batch_without_images_has_zero_encoder_gradients() -> None:
    model = build(pair_config("llama", "clip"))
    text_only = microbatch([9, 5])
    loss = model(text_only)
    loss.backward()
    for name, parameter in model.encoders.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    assert relative_error(loss, model.llm(text_only, {})) < 1e-6


def test_frozen_modules_have_no_gradients() -> None:
    images = EncoderInputs(torch.randn(1, 3, 16, 16), [(1, 4, 4)], torch.arange(3, 19))
    batch = microbatch([22], {"eye": images}, images.positions_K)
    unfrozen = build(pair_config("llama", "clip"))
    unfrozen(batch).backward()
    frozen = build(pair_config("llama", "clip"), freeze=("llm", "eye"))
    frozen(batch).backward()
    reference = {n: p.grad for n, p in unfrozen.named_parameters()}
    for name, parameter in frozen.named_parameters():
        if module_of(name) == "eye.connector":
            assert parameter.grad is not None
            assert relative_error(parameter.grad, reference[name]) < 1e-6
        else:
            assert parameter.grad is None, name
    assert frozen.parameter_counts()["llm"][1] == 0
    assert not frozen.llm.describe().trainable
    assert frozen.encoders["eye"].describe().connector_trainable


def test_all_problems_of_model_are_listed() -> None:
    qwen2 = {**LLMS["qwen2"], "num_attention_heads": 5, "attention_dropout": 0.1}
    video = EncoderConfig(config=ENCODERS["clip"], feature_layer=-9)
    config = ModelConfig(llm=LlmConfig(config=qwen2), encoders={"eye": video})
    with pytest.raises(ConfigError) as caught:
        build(config)
    text = str(caught.value)
    assert "hidden_size = 32 is not divisible by its 5 heads" in text
    assert "5 is not divisible by the 2 num_key_value_heads" in text
    assert "attention_dropout = 0.1 is not supported" in text
    assert "feature_layer = -9, but the encoder has 3 layers" in text


def test_dropout_of_starcoder2_is_rejected() -> None:
    settings = {"residual_dropout": 0.1, "embedding_dropout": 0.2}
    with pytest.raises(ConfigError) as caught:
        build(ModelConfig(llm=LlmConfig(config={**LLMS["starcoder2"], **settings})))
    for (key, value), problem in zip(settings.items(), caught.value.problems, strict=True):
        assert f"{key} = {value} is not supported" in problem


@pytest.mark.parametrize("model_type", ["gpt2", "nonsense"])
def test_unsupported_llm_is_rejected_with_alternatives(model_type: str) -> None:
    config = ModelConfig(llm=LlmConfig(config={"model_type": model_type}))
    with pytest.raises(
        ConfigError, match=r"\[model\.llm\].*(registered model types: llama|is unknown)"
    ):
        build(config)


def test_renamed_modules_of_transformers_are_reported(monkeypatch) -> None:
    renamed = replace(LLM_FAMILIES["llama"], norms=("input_norm",))
    monkeypatch.setitem(LLM_FAMILIES, "llama", renamed)
    tower = type(ENCODER_FAMILIES["clip_vision_model"])()
    tower.tensor_parallel = {"attention.query": "colwise"}
    monkeypatch.setitem(ENCODER_FAMILIES, "clip_vision_model", tower)
    with pytest.raises(ConfigError) as caught:
        build(pair_config("llama", "clip"))
    first, second = caught.value.problems
    assert "layers of 'llama' have no input_norm in transformers 5." in first
    assert "'clip_vision_model' have no attention.query in transformers 5." in second


def test_every_family_is_among_cases() -> None:
    """Check the cases of comparison with Hugging Face, of pipeline stages and of file formats."""
    assert {config["model_type"] for config in LLMS.values()} == set(LLM_FAMILIES)
    multimodal_types = {config["model_type"] for config in COMPOSITES.values()}
    assert multimodal_types == set(COMPOSITE_KINDS)
    encoders = ENCODERS.values()
    assert {config["model_type"] for config in encoders} == set(ENCODER_FAMILIES)


def test_documentation_names_every_family() -> None:
    text = (Path(__file__).parents[3] / "docs/reference/models.md").read_text()
    names = (*LLM_FAMILIES, *ENCODER_FAMILIES, *COMPOSITE_KINDS)
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize(
    ("name", "theirs", "ours", "switch", "size"),
    [
        ("internvl", "GotOcr2", "GotOcr2", "crop_to_patches", {"size": SQUARE}),
        ("smolvlm", "SmolVLM", "Siglip", "do_image_splitting", {"max_image_size": 16}),
        ("gemma3", "Gemma3", "Gemma3", "do_pan_and_scan", {"size": SQUARE}),
    ],
)
def test_checkpoint_processor_determines_tiles(
    name: str, theirs: str, ours: str, switch: str, size: dict, tmp_path: Path
) -> None:
    def spec(kind: str = "", **recipe: object) -> ImageSpec:
        source = {"source": str(tmp_path / kind)} if kind else {"config": COMPOSITES[name]}
        return build(ModelConfig(**source, processor=recipe)).image_specs()["vision"]

    AutoConfig.for_model(**COMPOSITES[name]).save_pretrained(tmp_path / "bare")
    AutoConfig.for_model(**COMPOSITES[name]).save_pretrained(tmp_path / "hf")
    kind = getattr(transformers, f"{theirs}ImageProcessorPil")
    kind(image_mean=[0.1, 0.2, 0.3], **size).save_pretrained(tmp_path / "hf")
    assert spec().tiles is None and spec("bare").tiles is None
    default_tiles = spec("hf").tiles
    assert (default_tiles is None) == (name == "gemma3")  # the Hugging Face default is off
    for actual in (spec("hf", **{switch: True}), spec(**{switch: True})):
        assert actual.tiles is not None
        assert actual.tiles.processor_class == f"{theirs}ImageProcessor"
        assert actual.tiles.processor[switch] is True
        assert switch not in actual.processor
    single = spec("hf", **{switch: False})
    assert single.tiles is None
    assert single.processor_class.removesuffix("Pil") == f"{ours}ImageProcessor"
    assert single.processor["image_mean"] == [0.1, 0.2, 0.3]
    assert single.processor["size"] == SQUARE
    assert switch not in single.processor


def test_image_markers_are_tokenizer_tokens() -> None:
    words = {f"w{i}": i for i in range(59)}
    words |= {"\n\n": 59, "<end>": 60, "<start>": 61, "</img>": 62, "<image>": 63}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")))
    spec = build(composite_config("gemma3")).text_spec(tokenizer)
    assert (spec.image_prefix, spec.image_suffix) == (("\n\n", 61), (60, "\n\n"))
    with pytest.raises(ConfigError, match="the tokenizer has no token '<img>', which is next to"):
        build(composite_config("internvl")).text_spec(tokenizer)


def test_freezing_unknown_module_lists_modules() -> None:
    with pytest.raises(ConfigError, match=r"'ear' is not a module; use any of: .*eye\.connector"):
        build(pair_config("llama", "clip"), freeze=("ear",))


def test_siglip_in_llava_requires_first_patch() -> None:
    siglip = {**COMPOSITES["llava"]["vision_config"], "model_type": "siglip_vision_model"}
    with pytest.raises(ConfigError, match="drops the first patch"):
        build(composite_config("llava", vision_config=siglip))


@pytest.mark.parametrize(
    ("name", "encoder"),
    [("llava", "dinov3"), ("llava", "metaclip_2"), ("llava", "gemma4"), ("llava_next", "pixtral")],
)
def test_unsupported_encoder_of_llava_is_rejected(name: str, encoder: str) -> None:
    with pytest.raises(ConfigError, match=r"vision encoder .* is not supported"):
        build(composite_config(name, vision_config=ENCODERS[encoder]))


@pytest.mark.parametrize("ratio", ["anyres", "pad"])
def test_unsupported_aspect_ratio_is_rejected(ratio: str) -> None:
    with pytest.raises(ConfigError, match=f"vision_aspect_ratio = '{ratio}' is not supported"):
        build(composite_config("llava_onevision", vision_aspect_ratio=ratio))


def test_misspelled_key_of_inline_config_is_reported() -> None:
    vision = {**COMPOSITES["llava"]["vision_config"], "hiden_act": "gelu"}
    with pytest.raises(
        ConfigError, match=r"vision_config\] 'hiden_act'.*did you mean 'hidden_act'"
    ):
        build(composite_config("llava", vision_config=vision))


def test_source_without_config_is_reported(tmp_path: Path) -> None:
    config = ModelConfig(llm=LlmConfig(source=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        build(config)


def test_inline_config_overrides_source_config(tmp_path: Path) -> None:
    AutoConfig.for_model(**COMPOSITES["llava"]).save_pretrained(tmp_path)
    change = {"text_config": {"num_hidden_layers": 1}}
    model = build(ModelConfig(source=str(tmp_path), config=change))
    assert len(model.llm.layers) == 1
    assert model.llm.text_config.hidden_size == 32
