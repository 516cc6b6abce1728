"""Encoder, LLM and generator through train.py on real data: reading and drawing in one run."""

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
    """Every picture is read from one source and drawn from the other."""
    values = {**CHANGES, **changes}
    dotted = {key.replace("__", "."): value for key, value in values.items()}
    sources = []
    for section, part in (("sources", "train"), ("validation", "validation")):
        path = f'path="{data}/tuxpaint_stamps/{part}"'
        sources.append(f'--data.{section}=[{{{path}}},{{{path},target_image_column="image"}}]')
    return arguments(run_dir, data) + [f"--{k}={v}" for k, v in dotted.items()] + sources


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    """One rank; a pipeline of two; the same, stopped in the middle and resumed."""
    root = tmp_path_factory.mktemp("generation")
    found = {}
    for name, ranks, steps in (("one", 1, [4]), ("pipeline", 2, [4]), ("resumed", 2, [2, 4])):
        for last in steps:
            changes = {"parallel__pipeline": ranks, "training__steps": last}
            given = command(root / name, real_data, **changes)
            codes, output = train_server.run(given, root / f"log-{name}-{last}", ranks)
            assert codes == [0] * ranks, output
        found[name] = root / name
    return found


def test_losses_are_the_same_in_a_pipeline(runs):
    for one, two in zip(records(runs["one"]), records(runs["pipeline"]), strict=True):
        for key in (*LOSSES, "grad_norm"):
            assert two[key] == (one[key] and pytest.approx(one[key], rel=1e-4)), key


def test_the_loss_is_the_weighted_sum_and_falls(runs):
    found = records(runs["one"])
    for record in found:
        for prefix in ("", "validation_") if record["validation_loss"] is not None else ("",):
            text, image = record[f"{prefix}loss_text"], record[f"{prefix}loss_image"]
            assert record[f"{prefix}loss"] == pytest.approx(0.5 * text + 2.0 * image, rel=1e-5)
        assert 0 < record["generator_ms"] < record["step_ms"]
        assert record["generated_images_per_s"] > 0 < record["media_per_s"]
    assert found[-1]["validation_loss_image"] < found[1]["validation_loss_image"]


def test_resuming_goes_on_bit_by_bit(runs):
    whole, resumed = weights(runs["pipeline"]), weights(runs["resumed"])
    assert whole.keys() == resumed.keys()
    assert any(name.startswith("optimizer.generator.") for name in whole)
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.mark.campaign
def test_balanced_generator_resumes_exactly(tmp_path, real_data, train_server):
    for name, steps in (("whole", [4]), ("resumed", [2, 4])):
        for last in steps:
            changes = {"data__balance": "images", "training__steps": last}
            given = command(tmp_path / name, real_data, checkpoint__export_hf="false", **changes)
            codes, output = train_server.run(given, tmp_path / f"log-{name}-{last}", 2)
            assert codes == [0, 0], output
    assert all(record["image_imbalance"] >= 1 for record in records(tmp_path / "whole"))
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_drawings_of_every_validation_are_saved(runs):
    for run_dir in runs.values():
        for step in (2, 4):
            with Image.open(run_dir / "generated_images" / f"step-{step}.png") as picture:
                assert min(picture.size) > 100
        assert json.loads((run_dir / "samples.json").read_text())


def test_the_export_is_a_diffusers_model_with_the_trained_weights(runs):
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
    assert (runs["pipeline"] / "hf" / "config.json").exists(), "the LLM and its encoder"


def test_an_export_is_where_another_run_begins(runs, tmp_path, real_data, train_server):
    """Without learning rate nothing but the LLM and encoder, which are new, differs."""
    directory = runs["one"] / "hf" / "generator"
    still = {"optimizer__lr": 0.0, "optimizer__module_lr": "{}", "training__steps": 2}
    given = command(tmp_path / "more", real_data, **still, checkpoint__export_hf="false")
    given = [a for a in given if not a.startswith("--model.generator.config=")]
    given.append(f"--model.generator.source={directory}")
    codes, output = train_server.run(given, tmp_path / "log", 1)
    assert codes == [0], output
    trained, begun = weights(runs["one"]), weights(tmp_path / "more")
    names = [name for name in trained if name.startswith("model.generator.")]
    assert len(names) > 30
    assert [name for name in names if not torch.equal(trained[name], begun[name])] == []


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


def test_latents_of_an_autoencoder_are_drawn(tmp_path, real_data, train_server):
    """It is exported beside the generator; a pipeline that is given it does the same steps."""
    one, pipeline = tmp_path / "one", tmp_path / "pipeline"
    given = command(one, real_data, **LATENT, model__generator__vae__config=VAE)
    codes, output = train_server.run(given, tmp_path / "log-one", 1)
    assert codes == [0], output
    exported = one / "hf" / "generator" / "vae"
    given = command(
        pipeline,
        real_data,
        **LATENT,
        parallel__pipeline=2,
        model__generator__vae__source=exported,
        checkpoint__export_hf="false",
    )
    codes, output = train_server.run(given, tmp_path / "log-pipeline", 2)
    assert codes == [0, 0], output
    for first, second in zip(records(one), records(pipeline), strict=True):
        for key in (*LOSSES, "grad_norm"):
            assert second[key] == (first[key] and pytest.approx(first[key], rel=1e-4)), key
    for run_dir in (one, pipeline):
        assert (run_dir / "generated_images" / "step-4.png").exists()
    words = ["--prompt", "A red fish.", "--prompt", "A boat.", "--denoising-steps", "2"]
    given = [str(pipeline), *words, "--generate-images", str(tmp_path / "drawn")]
    codes, output = train_server.run(given, tmp_path / "log-drawn", 1, script=GENERATE)
    assert codes == [0], output
    assert f"A boat.: {tmp_path / 'drawn' / '1.png'}" in output
    pictures = [Image.open(tmp_path / "drawn" / f"{number}.png") for number in range(2)]
    assert {picture.size for picture in pictures} == {(16, 16)}
    assert pictures[0].tobytes() != pictures[1].tobytes()
    vae, notes = diffusers.AutoencoderKL.from_pretrained(exported, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    saved = {name.partition("[")[0]: value for name, value in weights(one).items()}
    name = "encoder.conv_in.weight"
    assert torch.equal(saved[f"model.generator.latent_encoder.{name}"], vae.get_parameter(name))
    begun = {name.partition("[")[0]: value for name, value in weights(pipeline).items()}
    for name, value in saved.items():
        if ".latent_" in name:
            assert torch.equal(begun[name], value), name
    assert not any(".latent_" in name for name in saved if name.startswith("optimizer."))
