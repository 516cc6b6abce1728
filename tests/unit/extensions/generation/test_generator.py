"""The generator matches its diffusers class for each image, independent of batching."""

import copy
import dataclasses

import pytest
import torch
from generator_cases import PIXART, VALUES, generator_config, generator_inputs
from model_cases import LLMS, build, make_inputs, microbatch, randomize, relative_error
from torch import Tensor

from torchmm.common.batch import EncoderInputs, Microbatch
from torchmm.common.errors import ConfigError
from torchmm.common.generated import GeneratedMeta, GeneratorInputs
from torchmm.extensions.generation.generator import DitModule
from torchmm.models.build import build_model
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.layered import stage_ranges
from torchmm.models.multimodal import MultimodalModel, materialize, module_of
from torchmm.recipe.model_section import FreezeConfig, GeneratorConfig, LlmConfig, ModelConfig

diffusers = pytest.importorskip("diffusers")

GRIDS, CONTEXTS = [(1, 4, 4), (1, 4, 4)], [5, 5]
MIXED_GRIDS, MIXED_CONTEXTS = [(1, 4, 4), (3, 4, 4), (1, 2, 3)], [5, 2, 7]
D_LLM = LLMS["llama"]["hidden_size"]


@pytest.fixture(scope="module")
def model() -> MultimodalModel:
    return build(generator_config())


def context(contexts: list[int]) -> Tensor:
    return torch.randn(sum(contexts), D_LLM, generator=torch.Generator().manual_seed(5))


def diffusers_pixart(model: MultimodalModel) -> diffusers.PixArtTransformer2DModel:
    """Return the model of diffusers with equal weights."""
    plain = diffusers.PixArtTransformer2DModel(**model.generator.spec.config)
    prefixes = hf_prefixes(model)
    state = {hf_name(prefixes, "generator", n): t for n, t in model.generator.state_dict().items()}
    loaded = plain.load_state_dict(state, strict=False)
    assert not loaded.missing_keys and not loaded.unexpected_keys
    return plain


def to_pixels(patches_PV: Tensor, side: int = 4) -> Tensor:
    """Return images (N, 3, 16, 16) from concatenated patches."""
    blocks = patches_PV.view(-1, side, side, 3, 4, 4).permute(0, 3, 1, 4, 2, 5)
    return blocks.reshape(-1, 3, 4 * side, 4 * side)


def reference_loss(plain, inputs: GeneratorInputs, context_KD: Tensor) -> Tensor:
    """Return the flow matching loss, computed independently on complete images."""
    pixels, noise = to_pixels(inputs.patches_PV), to_pixels(inputs.noise_PV)
    times = torch.tensor(inputs.times)
    t = times[:, None, None, None]
    velocity = plain(
        (1 - t) * pixels + t * noise,
        encoder_hidden_states=context_KD.view(len(times), -1, D_LLM),
        timestep=1000 * times,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample
    return (velocity - (noise - pixels)).square().mean(dim=(1, 2, 3)).sum()


def test_generator_matches_diffusers_loss_and_gradients(model):
    inputs, ours, theirs = generator_inputs(GRIDS, CONTEXTS), context(CONTEXTS), context(CONTEXTS)
    plain = diffusers_pixart(model)
    model.zero_grad()
    loss = model.generator(inputs, ours.requires_grad_())
    reference = reference_loss(plain, inputs, theirs.requires_grad_())
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    loss.backward()
    reference.backward()
    assert relative_error(ours.grad, theirs.grad) < 1e-5
    gradients = {n: p.grad for n, p in plain.named_parameters()}
    largest = max(g.norm().item() for g in gradients.values())
    for name, parameter in model.generator.named_parameters():
        expected = gradients.pop(hf_name(hf_prefixes(model), "generator", name))
        if expected.norm() < 1e-6 * largest:  # bias of keys: zero except for rounding
            assert parameter.grad.norm() < 1e-5 * largest, name
        else:
            assert relative_error(parameter.grad, expected) < 1e-5, name
    assert not gradients


def test_padding_does_not_change_loss_or_velocity(model):
    inputs, features = generator_inputs(MIXED_GRIDS, MIXED_CONTEXTS), context(MIXED_CONTEXTS)
    single, velocities = [], []
    for number, part in enumerate(features.split(MIXED_CONTEXTS)):
        image = inputs.select(range(number, number + 1))
        single.append(model.generator(image, part))
        velocities.append(model.generator.velocity(image, part))
    batched = model.generator(inputs, features)
    assert batched.item() == pytest.approx(torch.stack(single).sum().item(), rel=1e-5)
    velocity = model.generator.velocity(inputs, features)
    assert relative_error(velocity, torch.cat(velocities)) < 1e-5


def test_velocity_depends_on_frame_order_and_content(model):
    inputs, features = generator_inputs([(3, 4, 4)], [4]), context([4])
    before = model.generator.velocity(inputs, features).view(3, 16, VALUES)
    inputs.patches_PV[:32] = inputs.patches_PV[:32].roll(16, 0)
    inputs.noise_PV[:32] = inputs.noise_PV[:32].roll(16, 0)
    after = model.generator.velocity(inputs, features).view(3, 16, VALUES)
    assert relative_error(after[[1, 0, 2]], before) > 1e-2, "swapped frames must differ"
    inputs.patches_PV[:16] += 1
    assert relative_error(model.generator.velocity(inputs, features)[32:], after[2]) > 1e-3


def test_excluded_images_have_no_loss_and_gradient(model):
    inputs, features = generator_inputs(GRIDS, CONTEXTS), context(CONTEXTS).requires_grad_()
    inputs.in_loss = [False, True]
    loss = model.generator(inputs, features)
    loss.backward()
    second_loss = model.generator(inputs.select(range(1, 2)), features[5:])
    assert loss.item() == pytest.approx(second_loss.item(), rel=1e-5)
    assert features.grad[:5].norm() == 0 < features.grad[5:].norm()
    inputs.in_loss = [False, False]
    assert model.generator(inputs, features).item() == 0


def example() -> Microbatch:
    """Return two samples with input images in the first, and one target image after each sample."""
    pixels = make_inputs("clip")
    placeholders = torch.arange(3, 35)
    images = {"eye": EncoderInputs(pixels.pixels, pixels.grids_thw, placeholders)}
    batch = microbatch([41, 9], images, placeholders)
    context_positions = torch.cat([torch.arange(34, 39), torch.arange(42, 49)])
    batch.generator = generator_inputs(GRIDS, [5, 7], context_positions)
    return batch


def test_generator_gradients_reach_encoder_and_llm(model):
    model.zero_grad()
    losses = model.losses(example())
    losses["generator"].backward()
    modules = {
        module_of(n) for n, p in model.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert modules == {"eye", "eye.connector", "llm", "generator", "generator.connector"}
    assert model.llm.backbone.lm_head.weight.grad is None, "the head is used for text only"


def test_text_loss_is_independent_of_generator(model):
    batch = example()
    losses = model.losses(batch)
    assert losses["llm"].item() == model(batch).item()
    text = ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders=generator_config().encoders)
    without = build(text)
    without.load_state_dict(
        {n: t for n, t in model.state_dict().items() if not n.startswith("generator.")}
    )
    assert without(batch).item() == pytest.approx(losses["llm"].item(), rel=1e-6)


@pytest.mark.parametrize("llm", LLMS)
def test_generator_context_is_input_of_head(llm):
    model = build(generator_config(llm, encoder=None))
    batch = microbatch([12, 9])
    batch.generator = generator_inputs(GRIDS, [3, 4], torch.tensor([5, 6, 7, 15, 16, 17, 18]))
    _, context_KD = model.llm(batch, {})
    head = model.llm.backbone.lm_head
    logits = head(context_KD)
    if cap := LLMS[llm].get("final_logit_softcapping"):
        logits = cap * torch.tanh(logits / cap)
    expected = model.llm.logits(batch, {}, batch.generator.context_positions_K)
    scale = (expected * logits).sum() / logits.square().sum()  # granite divides its logits
    assert relative_error(logits * scale, expected) < 1e-5


def test_batch_without_images_has_no_generator_loss(model):
    model.zero_grad()
    losses = model.losses(microbatch([8, 5]))
    assert losses["generator"].item() == 0
    losses["generator"].backward()
    assert all(not p.grad.any() for p in model.generator.parameters() if p.grad is not None)


@pytest.mark.parametrize("stages", [[(0, 1), (1, 3)], [(0, 0), (0, 1), (1, 2), (2, 3), (3, 3)]])
def test_generator_stages_match_full_generator(stages):
    config = generator_config()
    full = build(config)
    inputs, features = generator_inputs(MIXED_GRIDS, MIXED_CONTEXTS), context(MIXED_CONTEXTS)
    staged = build_model(config, FreezeConfig())
    staged.reduce_to_stages({"generator": stage_ranges(stages)})
    materialize(staged, "cpu")
    init_weights(staged, 0)
    values = full.state_dict()
    staged.load_state_dict({name: values[name] for name in staged.state_dict()})
    stage_context, full_context = (
        features.clone().requires_grad_(),
        features.clone().requires_grad_(),
    )
    state = stage_context
    for stage in staged.stages["generator"]:
        state = stage(inputs, state)
    loss = full.generator(inputs, full_context)
    assert state.item() == pytest.approx(loss.item(), rel=1e-6)
    state.backward()
    loss.backward()
    assert relative_error(stage_context.grad, full_context.grad) < 1e-5
    for name, parameter in staged.generator.named_parameters():
        assert relative_error(parameter.grad, full.generator.get_parameter(name).grad) < 1e-5, name
    parameters = [sum(p.numel() for p in s.parameters()) for s in staged.stages["generator"]]
    assert sum(parameters) == sum(p.numel() for p in full.generator.parameters())


def test_initial_velocity_is_zero():
    model = build_model(generator_config(), FreezeConfig())
    materialize(model, "cpu")
    init_weights(model, 0)
    again = build_model(generator_config(), FreezeConfig())
    materialize(again, "cpu")
    init_weights(again, 0)
    inputs, features = generator_inputs(GRIDS, CONTEXTS), context(CONTEXTS)
    assert not model.generator.velocity(inputs, features).any()
    for name, parameter in model.generator.named_parameters():
        assert torch.equal(parameter, again.generator.get_parameter(name)), name
    zeros = {n for n, p in model.generator.named_parameters() if p.ndim > 1 and not p.any()}
    to_out = {f"dit.transformer_blocks.{i}.attn2.to_out.0.weight" for i in range(3)}
    assert zeros == {"dit.proj_out.weight", *to_out}


def test_generator_description_and_message_shapes(model):
    described = model.generator.describe()
    assert described.kind == "generator" and len(described.layers) == 3
    assert not any(layer.rotary for layer in described.layers)
    assert described.parameters == sum(p.numel() for p in model.generator.parameters())
    parts = sum(layer.parameters for layer in described.layers)
    assert (
        described.parameters == parts + described.embedding_parameters + described.head_parameters
    )
    inputs, features = generator_inputs(MIXED_GRIDS, MIXED_CONTEXTS), context(MIXED_CONTEXTS)
    first = copy.deepcopy(model.generator)
    first.is_last = False
    state = first(inputs, features)
    metas = [GeneratedMeta(g, c) for g, c in zip(MIXED_GRIDS, MIXED_CONTEXTS, strict=True)]
    size = model.generator.spec.hidden_size
    assert state.hidden_NPD.shape == (len(metas), max(m.patches for m in metas), size)
    assert state.time_NE.shape == (3, model.generator.time_features())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"_class_name": "FluxTransformer2DModel"}, "'FluxTransformer2DModel' is not supported"),
        (
            {"_class_name": "UNet2DConditionModel"},
            "A U-Net has no layers that can be split into stages",
        ),
        ({"num_layer": 3}, "did you mean 'num_layers'"),
        ({"in_channels": 4}, "in_channels = 4, but it must be 3"),
        ({"sample_size": 18}, "not a multiple of patch_size"),
        ({"attention_head_dim": 3, "num_attention_heads": 2}, "must be a multiple of 4"),
        ({"ffn_size": 0}, "ffn_size = 0"),
    ],
)
def test_invalid_generator_config_is_rejected(settings, words):
    with pytest.raises(ConfigError, match=words):
        build_model(generator_config(**settings), FreezeConfig())


def test_problems_of_all_modules_are_reported():
    config = generator_config(num_layer=1).model_copy(
        update={"llm": LlmConfig(config={**LLMS["llama"], "num_attention_heads": 5})}
    )
    with pytest.raises(ConfigError) as caught:
        build_model(config, FreezeConfig())
    assert len(caught.value.problems) == 2


def test_frozen_generator_trains_its_connector():
    model = build(generator_config(), freeze=("generator", "llm", "eye", "eye.connector"))
    described = model.generator.describe()
    assert not described.trainable and described.connector_trainable
    losses = model.losses(example())
    assert not losses["llm"].requires_grad
    losses["generator"].backward()
    trained = {module_of(n) for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {"generator.connector"}


def test_generator_loads_weights_including_connector(tmp_path):
    source = build(generator_config(encoder=None))
    diffusers_pixart(source).save_pretrained(tmp_path / "generator")
    section = GeneratorConfig(source=str(tmp_path / "generator"))
    for llm, connector in (("llama", True), ("wide", False)):
        sizes = {"hidden_size": 48, "num_attention_heads": 6} if llm == "wide" else {}
        config = ModelConfig(llm=LlmConfig(config={**LLMS["llama"], **sizes}), generator=section)
        model = build_model(config, FreezeConfig())
        materialize(model, "cpu")
        init_weights(model, 3, skip=load_weights(model))
        assert isinstance(model.generator, DitModule)
        for name, parameter in model.generator.named_parameters():
            if name.startswith("connector.") and not connector:
                continue
            assert torch.equal(parameter, source.generator.get_parameter(name)), name


def test_feed_forward_width_is_configurable(tmp_path, model):
    width, hidden = 40, PIXART["num_attention_heads"] * PIXART["attention_head_dim"]
    source = build(generator_config(encoder=None, ffn_size=width))
    described, usual = source.generator.describe(), model.generator.describe()
    assert {layer.ffn_size for layer in described.layers} == {width}
    saved = (4 * hidden - width) * (2 * hidden + 1) * PIXART["num_layers"]
    assert usual.parameters - described.parameters == saved
    source.generator(generator_inputs(GRIDS, CONTEXTS), context(CONTEXTS)).backward()
    transformer = source.generator.build_transformer()
    prefixes = hf_prefixes(source)
    state = source.generator.state_dict()
    transformer.load_state_dict(
        {hf_name(prefixes, "generator", n): t for n, t in state.items()}, False
    )
    transformer.save_pretrained(tmp_path / "generator")
    section = GeneratorConfig(source=str(tmp_path / "generator"))
    config = ModelConfig(llm=LlmConfig(config=LLMS["llama"]), generator=section)
    again = build_model(config, FreezeConfig())
    materialize(again, "cpu")
    init_weights(again, 3, skip=load_weights(again))
    for name, parameter in again.generator.named_parameters():
        assert torch.equal(parameter, source.generator.get_parameter(name)), name


def test_randomized_weights_are_nonzero(model):
    """Check this because comparisons of zero weights prove nothing."""
    randomize(copy.deepcopy(model))
    assert all(p.any() for p in model.parameters())
    assert PIXART["num_layers"] == len(model.generator.layers)


def test_diffusers_scheduler_generates_same_images(model):
    """Compare `draw` of a pipeline with the scheduler that a user of the export runs."""
    inputs, features, steps = generator_inputs(GRIDS, CONTEXTS), context(CONTEXTS), 4
    plain, scheduler = diffusers_pixart(model), model.generator.family.scheduler()
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    theirs, ours = to_pixels(inputs.noise_PV), inputs.noise_PV
    with torch.no_grad():
        for time in scheduler.timesteps:
            velocity = plain(
                theirs,
                encoder_hidden_states=features.view(2, -1, D_LLM),
                timestep=time.expand(2),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ).sample
            theirs = scheduler.step(velocity, time, theirs).prev_sample
        for step in range(steps, 0, -1):
            times = [step / steps] * 2
            now = dataclasses.replace(inputs, patches_PV=ours, noise_PV=ours, times=times)
            ours = ours - model.generator.velocity(now, features) / steps
    assert relative_error(to_pixels(ours), theirs) < 1e-5
