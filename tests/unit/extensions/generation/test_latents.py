"""A generator of latents matches the autoencoder and transformer of diffusers."""

import copy
import dataclasses
import json

import pytest
import torch
from counting import count_flops
from generator_cases import LATENT_VALUES, VAE, generator_inputs, latent_config
from model_cases import LLMS, build, relative_error
from safetensors.torch import load_file, save_file
from support.allocations import CountPeak
from torch import Tensor, nn

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.common.generated import GeneratedMeta, GeneratorInputs
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.flops import microbatch_flops
from torchmm.costs.operators import AutoencoderBlock
from torchmm.costs.sizes import generator_sizes
from torchmm.extensions.generation.generator import DitModule
from torchmm.extensions.generation.latents import to_images, to_patches
from torchmm.models.build import build_model
from torchmm.models.hf.export import hf_name, hf_prefixes
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.recipe.model_section import AutoencoderConfig, FreezeConfig

diffusers = pytest.importorskip("diffusers")

GRIDS, CONTEXTS = [(1, 4, 4), (1, 4, 4)], [5, 5]
MIXED_GRIDS, MIXED_CONTEXTS = [(1, 4, 4), (3, 2, 3), (1, 4, 4), (2, 2, 3)], [5, 2, 7, 3]
D_LLM = LLMS["llama"]["hidden_size"]


@pytest.fixture(scope="module", params=["mean", "sampled"])
def model(request) -> MultimodalModel:
    return build(latent_config(request.param))


def latent_mode(model: MultimodalModel) -> str:
    return "sampled" if model.generator.spec.latents.sampled else "mean"


def context(contexts: list[int]) -> Tensor:
    return torch.randn(sum(contexts), D_LLM, generator=torch.Generator().manual_seed(5))


def diffusers_models(model: MultimodalModel) -> tuple:
    """Return the transformer and the autoencoder of diffusers with equal weights."""
    transformer = diffusers.PixArtTransformer2DModel(**model.generator.spec.config)
    vae = diffusers.AutoencoderKL(**VAE)
    prefixes = hf_prefixes(model)
    state = model.generator.state_dict()
    vae_state = {n: t for n, t in state.items() if n.startswith("latent_")}
    transformer_state = {
        hf_name(prefixes, "generator", n): t for n, t in state.items() if n not in vae_state
    }
    assert not any(transformer.load_state_dict(transformer_state, strict=False))
    vae.load_state_dict({n.partition(".")[2]: t for n, t in vae_state.items()})
    return transformer, vae.eval()


def reference_loss(transformer, vae, inputs: GeneratorInputs, context_KD: Tensor) -> Tensor:
    """Return the latent flow matching loss, computed independently on complete images."""
    pixels = to_images(inputs.patches_PV, (len(inputs.times), 4, 4), 4)
    noise = to_images(inputs.target_noise_PV, (len(inputs.times), 4, 4), 2)
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        latents = posterior.mode()
        if inputs.latent_noise_PV is not None:
            latent_noise = to_images(inputs.latent_noise_PV, (len(inputs.times), 4, 4), 2)
            latents = posterior.mean + posterior.std * latent_noise
        latents = (latents - 0.1) * 0.6
    times = torch.tensor(inputs.times)
    t = times[:, None, None, None]
    velocity = transformer(
        (1 - t) * latents + t * noise,
        encoder_hidden_states=context_KD.view(len(times), -1, D_LLM),
        timestep=1000 * times,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample
    return (velocity - (noise - latents)).square().mean(dim=(1, 2, 3)).sum()


def test_export_description_has_autoencoder(model):
    description = model.generator.describe_export()
    assert description["source"] == "generator"
    assert description["vae"] == {"source": "generator/vae", "latent_mode": latent_mode(model)}


def test_latent_generator_matches_diffusers_loss_and_gradients(model):
    inputs = generator_inputs(GRIDS, CONTEXTS, latents=latent_mode(model))
    ours, theirs = context(CONTEXTS), context(CONTEXTS)
    transformer, vae = diffusers_models(model)
    model.zero_grad()
    loss = model.generator(inputs, ours.requires_grad_())
    reference = reference_loss(transformer, vae, inputs, theirs.requires_grad_())
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    loss.backward()
    reference.backward()
    assert relative_error(ours.grad, theirs.grad) < 1e-5
    largest = max(p.grad.norm() for p in transformer.parameters())
    for name, parameter in model.generator.named_parameters():
        if name.startswith("latent_"):
            assert parameter.grad is None and not parameter.requires_grad, name
            continue
        expected = transformer.get_parameter(hf_name(hf_prefixes(model), "generator", name)).grad
        if expected.norm() < 1e-6 * largest:  # bias of keys: zero except for rounding
            assert parameter.grad.norm() < 1e-5 * largest, name
        else:
            assert relative_error(parameter.grad, expected) < 1e-5, name


def test_autoencoder_changes_affect_reference_loss(model):
    """Check that a changed latent changes the reference loss of the comparison above."""
    inputs = generator_inputs(GRIDS, CONTEXTS, latents=latent_mode(model))
    transformer, vae = diffusers_models(model)
    with torch.no_grad():
        vae.encoder.conv_out.bias[0] += 1e-3
    loss = model.generator(inputs, context(CONTEXTS)).item()
    assert reference_loss(transformer, vae, inputs, context(CONTEXTS)).item() != pytest.approx(
        loss, rel=1e-5
    )
    if latent_mode(model) == "sampled":
        inputs.noise_PV[:, LATENT_VALUES:] *= 1.01
        assert model.generator(inputs, context(CONTEXTS)).item() != pytest.approx(loss, rel=1e-5)


def test_batching_and_chunks_do_not_change_loss(model):
    features = context(MIXED_CONTEXTS)
    inputs = generator_inputs(MIXED_GRIDS, MIXED_CONTEXTS, latents=latent_mode(model))
    single = [
        model.generator(inputs.select(range(number, number + 1)), part)
        for number, part in enumerate(features.split(MIXED_CONTEXTS))
    ]
    batched = model.generator(inputs, features)
    assert batched.item() == pytest.approx(torch.stack(single).sum().item(), rel=1e-5)
    encoder = copy.copy(model.generator.latent_encoder)
    sizes = encoder.spec.sizes._replace(encode_batch_size=2)
    chunked = copy.copy(encoder)
    chunked.spec = dataclasses.replace(encoder.spec, sizes=sizes)
    arguments = inputs.patches_PV, inputs.grids_thw, inputs.latent_noise_PV
    assert relative_error(chunked(*arguments), encoder(*arguments)) < 1e-5


def test_generated_latents_decode_as_diffusers(model):
    inputs, features = (
        generator_inputs(GRIDS, CONTEXTS, latents=latent_mode(model)),
        context(CONTEXTS),
    )
    noisy = inputs.target_noise_PV
    now = dataclasses.replace(inputs, patches_PV=noisy, noise_PV=noisy, is_encoded=True)
    with torch.no_grad():
        velocity = model.generator.velocity(now, features)
        pixels = model.generator.decode_latents(now, features)
        times = torch.tensor(inputs.times).repeat_interleave(16)[:, None]
        latents = to_images(noisy - times * velocity, (2, 4, 4), 2)
        _, vae = diffusers_models(model)
        expected = vae.decode(latents / 0.6 + 0.1).sample
    assert relative_error(to_images(pixels, (2, 4, 4), 4), expected) < 1e-5


def test_generator_stages_pass_latents(model):
    inputs = generator_inputs(MIXED_GRIDS, MIXED_CONTEXTS, latents=latent_mode(model))
    features = context(MIXED_CONTEXTS)
    first, last = copy.deepcopy(model.generator), copy.deepcopy(model.generator)
    first.is_last = False
    last.is_first = False
    del last.latent_encoder
    state = first(inputs, features)
    assert state.latents_AV.shape == (sum(16 if g[1] == 4 else g[0] * 6 for g in MIXED_GRIDS), 8)
    assert not state.latents_AV.requires_grad
    last_inputs = dataclasses.replace(inputs, patches_PV=torch.zeros(0))
    layers = first.dit.transformer_blocks
    last.dit.transformer_blocks = torch.nn.ModuleList([torch.nn.Identity()] * len(layers))
    last.indexed_layers = list  # the first stage runs all layers
    assert last(last_inputs, state).item() == pytest.approx(
        model.generator(inputs, features).item()
    )


def test_patches_round_trip_to_images():
    images = torch.arange(2 * 3 * 8 * 12).view(2, 3, 8, 12)
    patches = to_patches(images, 4)
    assert patches.shape == (2 * 2 * 3, 48)
    assert torch.equal(patches[1].view(3, 4, 4), images[0, :, :4, 4:8])
    assert torch.equal(to_images(patches, (2, 2, 3), 4), images)


def test_autoencoder_loads_and_stays_frozen(tmp_path):
    _, vae = diffusers_models(build(latent_config()))
    vae.save_pretrained(tmp_path / "vae")
    section = AutoencoderConfig(source=str(tmp_path / "vae"))
    config = latent_config()
    generator_config = config.generator.model_copy(update={"vae": section})
    model = build_model(config.model_copy(update={"generator": generator_config}), FreezeConfig())
    materialize(model, "cpu")
    filled = load_weights(model)
    assert {n.split(".")[1] for n in filled} == {"latent_encoder", "latent_decoder"}
    init_weights(model, 3, skip=filled)
    assert isinstance(model.generator, DitModule)
    for name, value in vae.state_dict().items():
        half = "encoder" if name.startswith(("encoder", "quant")) else "decoder"
        assert torch.equal(model.generator.get_parameter(f"latent_{half}.{name}"), value), name
    described = model.generator.describe()
    assert sum(described.autoencoder_parameters) == sum(p.numel() for p in vae.parameters())
    total, trained = model.parameter_counts()["generator"]
    assert total - trained == sum(described.autoencoder_parameters)


def test_old_attention_names_of_autoencoder_load(tmp_path):
    _, vae = diffusers_models(build(latent_config()))
    vae.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    weights = {}
    for name, value in load_file(file).items():
        for new, former in old.items():
            name = name.replace(f".{new}.", f".{former}.")  # noqa: PLW2901
        weights[name] = value
    assert any("proj_attn" in name for name in weights)
    save_file(weights, file, metadata={"format": "pt"})
    config = latent_config()
    section = AutoencoderConfig(source=str(tmp_path))
    generator_config = config.generator.model_copy(update={"vae": section})
    config = config.model_copy(update={"generator": generator_config})
    model = build_model(config, FreezeConfig())
    materialize(model, "cpu")
    load_weights(model)
    name = "mid_block.attentions.0.to_q.weight"
    loaded = model.generator.get_parameter(f"latent_encoder.encoder.{name}")
    assert torch.equal(loaded, vae.encoder.get_parameter(name))
    del weights["decoder.conv_in.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing for 'generator': latent_decoder"):
        load_weights(model)


def test_random_autoencoder_depends_on_seed_only():
    one, same, other = (build_model(latent_config(), FreezeConfig()) for _ in range(3))
    for model, seed in ((one, 3), (same, 3), (other, 4)):
        materialize(model, "cpu")
        init_weights(model, seed)
    for name, value in one.generator.latent_encoder.state_dict().items():
        assert torch.equal(same.generator.latent_encoder.state_dict()[name], value)
        if value.ndim > 1:
            actual = other.generator.latent_encoder.state_dict()[name]
            assert not torch.equal(actual, value) and value.any(), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_channels": [8]}, "did you mean 'block_out_channels'"),
        ({"_class_name": "AutoencoderTiny"}, "'AutoencoderTiny' is not supported"),
        ({"in_channels": 4}, "in_channels = 4 is not supported; use 3"),
        ({"norm_num_groups": 5}, "norm_num_groups = 5 must divide"),
        ({"block_out_channels": [8]}, "must have the same length as down_block_types"),
        ({"scaling_factor": 0.0}, "must be above 0"),
        ({"latents_mean": [0.0, 0.0]}, "latents_mean"),
    ],
)
def test_invalid_autoencoder_config_is_rejected(settings, words):
    with pytest.raises(ConfigError, match=words):
        build_model(latent_config(vae=settings), FreezeConfig())


def test_directory_without_autoencoder_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    config = latent_config()
    for source in (tmp_path, tmp_path / "none"):
        section = AutoencoderConfig(source=str(source))
        generator_config = config.generator.model_copy(update={"vae": section})
        with pytest.raises(ConfigError, match=r"\[model.generator.vae\]"):
            build_model(config.model_copy(update={"generator": generator_config}), FreezeConfig())


def test_dummy_image_has_zero_generator_loss(model):
    inputs = model.generator.dummy_inputs(torch.device("cpu"))
    assert model.generator(inputs, torch.zeros(1, D_LLM)).item() == 0


META = MicrobatchMeta(
    tuple(
        SampleMeta("s", i, c, generated=(GeneratedMeta(g, c),))
        for i, (g, c) in enumerate(zip(GRIDS * 2, CONTEXTS * 2, strict=True))
    ),
    20,
)


def test_encoding_flops_match_torch_counter(model):
    """Compare with and without encoded latents. The difference is the encoder."""
    features = context(CONTEXTS * 2)
    inputs = generator_inputs(GRIDS * 2, CONTEXTS * 2, latents=latent_mode(model))
    encoded = model.generator.latent_encoder(
        inputs.patches_PV, inputs.grids_thw, inputs.latent_noise_PV
    )
    encoded_inputs = dataclasses.replace(
        inputs, patches_PV=encoded, noise_PV=inputs.target_noise_PV, is_encoded=True
    )
    with torch.no_grad():
        counted, loss = count_flops(lambda: model.generator(inputs, features))
        without, encoded_loss = count_flops(lambda: model.generator(encoded_inputs, features))
    assert loss.item() == pytest.approx(encoded_loss.item(), rel=1e-6)
    modules = [module.describe() for module in model.modality_modules()]
    actual = microbatch_flops(modules, META)["generator"].forward
    sizes = generator_sizes([META.generated])
    block = AutoencoderBlock(
        trained=False, needs_no_input_gradient=True, autoencoder=modules[-1].latents
    )
    encoding_flops = sum(float(flops_N[0]) for flops_N in block.flops(sizes))
    assert encoding_flops == pytest.approx(counted - without, rel=1e-6)
    assert actual == pytest.approx(counted, rel=0.01)


def test_norms_of_encoder_read_and_write_activations(model):
    """Count the values of all normalizations in a run of the encoder on 8 x 8 patches."""
    values: list[int] = []

    def count(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        values.append(inputs[0].numel() + output.numel())

    encoder = model.generator.latent_encoder.encoder
    norms = [module for module in encoder.modules() if isinstance(module, nn.GroupNorm)]
    handles = [norm.register_forward_hook(count) for norm in norms]
    side = 8 * model.generator.spec.latents.side_px
    encoder(torch.zeros(1, 3, side, side))
    for handle in handles:
        handle.remove()
    (norm,) = (work for work in model.generator.describe().latents.work if work.kind == "norm")
    assert norm.calls == len(values) > 0
    assert norm.elements == pytest.approx(sum(values) / 8**2)


@pytest.mark.parametrize("encode_batch_size", [1, 2, 8])
def test_encoding_memory_is_below_estimate(encode_batch_size):
    channels = {"block_out_channels": [16, 32], "norm_num_groups": 8, "layers_per_block": 2}
    model = build(latent_config(vae=channels, encode_batch_size=encode_batch_size))
    grids = [(1, 16, 16), (2, 12, 16), (1, 16, 16), (1, 16, 16)]
    inputs = generator_inputs(grids, [1] * 4, latents="mean")
    encoder = model.generator.latent_encoder
    held = [inputs.patches_PV, *encoder.parameters()]
    with CountPeak(held) as counter:
        before = counter.bytes
        encoder(inputs.patches_PV, inputs.grids_thw, None)
    measured = counter.peak_bytes - before
    sizes = generator_sizes([[GeneratedMeta(grid, 1) for grid in grids]], padding=True)
    setting = CostSetting(Execution(), 4)
    block = AutoencoderBlock(
        trained=False, needs_no_input_gradient=True, autoencoder=model.generator.describe().latents
    )
    needed = float(block.temporary_bytes(sizes, setting, torch.zeros(1).numpy())[0])
    assert measured <= needed
    assert measured > 0.5 * needed
