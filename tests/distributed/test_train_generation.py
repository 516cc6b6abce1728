"""Encoder, LLM and generator with train.py on real data: image input and output in one run."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_recipe import arguments, records, weights

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.slow
GENERATOR = (
    '{_class_name = "PixArtTransformer2DModel", num_attention_heads = 4, attention_head_dim = 8, '
    "num_layers = 2, sample_size = 16, patch_size = 8}"
)
CHANGES = {
    "training__steps": 4,
    "training__global_batch_size": 4,
    "validation__interval": 2,
    "validation__batches": 1,
    "validation__num_samples": 1,
    "validation__max_new_tokens": 2,
    "validation__generated_images": 3,
    "validation__denoising_steps": 2,
    "checkpoint__interval": 2,
    "checkpoint__export_hf": "true",
    "model__generator__config": GENERATOR,
    "model__generator__loss_weight": 2.0,
    "model__generator__text_loss_weight": 0.5,
    "optimizer__module_lr": '{"generator.connector" = 1e-4}',
    "parallel__generator__sub_microbatch_images": 3,
}
LOSSES = [
    f"{prefix}loss{name}" for prefix in ("", "validation_") for name in ("", "_text", "_image")
]


def command(run_dir: Path, data: Path, **changes: object) -> list[str]:
    """Return arguments with two sources: images as input, and images as target."""
    values = {**CHANGES, **changes}
    dotted = {key.replace("__", "."): value for key, value in values.items()}
    sources = []
    for section, part in (("sources", "train"), ("validation", "validation")):
        path = f'path="{data}/tuxpaint_stamps/{part}"'
        sources.append(f'--data.{section}=[{{{path}}},{{{path},target_image_column="image"}}]')
    return arguments(run_dir, data) + [f"--{k}={v}" for k, v in dotted.items()] + sources


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    """Run one rank, a two-stage pipeline, and a two-stage pipeline that resumes at step 2."""
    root = tmp_path_factory.mktemp("generation")
    directories = {}
    for name, ranks, steps in (("one", 1, [4]), ("pipeline", 2, [4]), ("resumed", 2, [2, 4])):
        for last in steps:
            changes = {"parallel__pipeline": ranks, "training__steps": last}
            arguments = command(root / name, real_data, **changes)
            codes, output = train_server.run(arguments, root / f"log-{name}-{last}", ranks)
            assert codes == [0] * ranks, output
        directories[name] = root / name
    return directories


def test_generation_losses_are_equal_in_pipeline(runs):
    for one, two in zip(records(runs["one"]), records(runs["pipeline"]), strict=True):
        for key in (*LOSSES, "grad_norm"):
            assert two[key] == (one[key] and pytest.approx(one[key], rel=1e-4)), key


def test_loss_is_weighted_sum_and_decreases(runs):
    steps = records(runs["one"])
    for record in steps:
        for prefix in ("", "validation_") if record["validation_loss"] is not None else ("",):
            text, image = record[f"{prefix}loss_text"], record[f"{prefix}loss_image"]
            assert record[f"{prefix}loss"] == pytest.approx(0.5 * text + 2.0 * image, rel=1e-5)
        assert 0 < record["generator_ms"] < record["step_ms"]
        assert record["generated_images_per_s"] > 0 < record["media_per_s"]
    assert steps[-1]["validation_loss_image"] < steps[1]["validation_loss_image"]


def test_generation_resume_is_bitwise_equal(runs):
    uninterrupted, resumed = weights(runs["pipeline"]), weights(runs["resumed"])
    assert uninterrupted.keys() == resumed.keys()
    assert any(name.startswith("optimizer.generator.") for name in uninterrupted)
    assert [
        name for name in uninterrupted if not torch.equal(uninterrupted[name], resumed[name])
    ] == []


@pytest.mark.campaign
def test_balanced_generator_resumes_exactly(tmp_path, real_data, train_server):
    for name, steps in (("uninterrupted", [4]), ("resumed", [2, 4])):
        for last in steps:
            changes = {"data__balance": "images", "training__steps": last}
            arguments = command(
                tmp_path / name, real_data, checkpoint__export_hf="false", **changes
            )
            codes, output = train_server.run(arguments, tmp_path / f"log-{name}-{last}", 2)
            assert codes == [0, 0], output
    assert all(record["image_imbalance"] >= 1 for record in records(tmp_path / "uninterrupted"))
    uninterrupted, resumed = weights(tmp_path / "uninterrupted"), weights(tmp_path / "resumed")
    assert uninterrupted.keys() == resumed.keys()
    assert [
        name for name in uninterrupted if not torch.equal(uninterrupted[name], resumed[name])
    ] == []


def test_validation_saves_generated_images(runs):
    for run_dir in runs.values():
        for step in (2, 4):
            with Image.open(run_dir / "generated_images" / f"step-{step}.png") as image:
                assert min(image.size) > 100
        assert json.loads((run_dir / "samples.json").read_text())


def test_export_is_diffusers_model_with_weights(runs):
    directory = runs["pipeline"] / "hf" / "generator"
    loaded, notes = diffusers.PixArtTransformer2DModel.from_pretrained(
        directory, output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    saved = {name.partition("[")[0]: value for name, value in weights(runs["pipeline"]).items()}
    exported = load_file(directory / "diffusion_pytorch_model.safetensors")
    assert torch.equal(exported["proj_out.weight"], saved["model.generator.dit.proj_out.weight"])
    connector = saved["model.generator.connector.linear_1.weight"]
    assert torch.equal(loaded.caption_projection.linear_1.weight, connector)
    assert (runs["pipeline"] / "hf" / "config.json").exists(), (
        "the export contains the LLM and its encoder"
    )


def test_exported_generator_initializes_another_run(runs, tmp_path, real_data, train_server):
    """The weights stay equal to the export, because the learning rate is 0."""
    directory = runs["one"] / "hf" / "generator"
    no_update = {"optimizer__lr": 0.0, "optimizer__module_lr": "{}", "training__steps": 2}
    options = command(tmp_path / "more", real_data, **no_update, checkpoint__export_hf="false")
    options = [a for a in options if not a.startswith("--model.generator.config=")]
    options.append(f"--model.generator.source={directory}")
    codes, output = train_server.run(options, tmp_path / "log", 1)
    assert codes == [0], output
    trained, initialized = weights(runs["one"]), weights(tmp_path / "more")
    names = [name for name in trained if name.startswith("model.generator.")]
    assert len(names) > 30
    assert [name for name in names if not torch.equal(trained[name], initialized[name])] == []


GENERATE = Path(__file__).parents[2] / "scripts" / "generate.py"
LATENT = {
    "model__generator__config": GENERATOR.replace(
        "sample_size = 16, patch_size = 8", "sample_size = 8, patch_size = 4"
    ),
    "model__generator__vae__latent_mode": "sampled",
}
VAE = (
    "{block_out_channels = [8, 8], norm_num_groups = 4, latent_channels = 2, "
    'down_block_types = ["DownEncoderBlock2D", "DownEncoderBlock2D"], '
    'up_block_types = ["UpDecoderBlock2D", "UpDecoderBlock2D"]}'
)


def test_autoencoder_latents_are_generated_and_exported(tmp_path, real_data, train_server):
    """The autoencoder is exported with the generator. A pipeline that loads it has equal losses."""
    one, pipeline = tmp_path / "one", tmp_path / "pipeline"
    options = command(one, real_data, **LATENT, model__generator__vae__config=VAE)
    codes, output = train_server.run(options, tmp_path / "log-one", 1)
    assert codes == [0], output
    exported = one / "hf" / "generator" / "vae"
    options = command(
        pipeline,
        real_data,
        **LATENT,
        parallel__pipeline=2,
        model__generator__vae__source=exported,
        checkpoint__export_hf="false",
    )
    codes, output = train_server.run(options, tmp_path / "log-pipeline", 2)
    assert codes == [0, 0], output
    for first, second in zip(records(one), records(pipeline), strict=True):
        for key in (*LOSSES, "grad_norm"):
            assert second[key] == (first[key] and pytest.approx(first[key], rel=1e-4)), key
    for run_dir in (one, pipeline):
        assert (run_dir / "generated_images" / "step-4.png").exists()
    prompts = ["--prompt", "A red fish.", "--prompt", "A boat.", "--denoising-steps", "2"]
    options = [str(pipeline), *prompts, "--generate-images", str(tmp_path / "generated")]
    codes, output = train_server.run(options, tmp_path / "log-generated", 1, script=GENERATE)
    assert codes == [0], output
    assert f"A boat.: {tmp_path / 'generated' / '1.png'}" in output
    images = [Image.open(tmp_path / "generated" / f"{number}.png") for number in range(2)]
    assert {image.size for image in images} == {(16, 16)}
    assert images[0].tobytes() != images[1].tobytes()
    vae, notes = diffusers.AutoencoderKL.from_pretrained(exported, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    saved = {name.partition("[")[0]: value for name, value in weights(one).items()}
    name = "encoder.conv_in.weight"
    assert torch.equal(saved[f"model.generator.latent_encoder.{name}"], vae.get_parameter(name))
    loaded = {name.partition("[")[0]: value for name, value in weights(pipeline).items()}
    for name, value in saved.items():
        if ".latent_" in name:
            assert torch.equal(loaded[name], value), name
    assert not any(".latent_" in name for name in saved if name.startswith("optimizer."))
