"""The autoencoder of latent recipes: files that a generator can load."""

import json

import pytest
import torch
from data_cases import png, write_parquet
from generator_cases import latent_config

from torchmm.common.errors import DataError
from torchmm.extensions.demo_data import stamp_vae
from torchmm.models.build import build_model
from torchmm.models.hf.load import load_weights
from torchmm.models.multimodal import materialize
from torchmm.recipe.model_section import AutoencoderConfig, FreezeConfig

diffusers = pytest.importorskip("diffusers")


def test_autoencoder_is_trained_and_loads_into_generator(tmp_path, monkeypatch):
    rows = [
        {"image": {"bytes": png(30 + n, 40, n), "path": None}, "file": f"{n // 2}.png"}
        for n in range(8)
    ]
    for part in ("train", "validation"):
        write_parquet(tmp_path / "tuxpaint_stamps" / part, rows)
    monkeypatch.setattr(stamp_vae, "STEPS", 3)
    before = torch.get_rng_state()
    stamp_vae.prepare(tmp_path, tmp_path, stamp_vae.OPTIONS)
    assert torch.equal(torch.get_rng_state(), before)
    entry = json.loads((tmp_path / "MANIFEST.json").read_text())["stamp_vae"]
    assert set(entry["counts"]) == {"parameters", "dB on held-out images"}
    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path / "stamp_vae")
    images = stamp_vae._read_images(tmp_path / "tuxpaint_stamps" / "train")
    assert images.shape == (4, 3, 48, 48), "each file once"
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.mean
    scaled = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    assert scaled.mean().item() == pytest.approx(0, abs=1e-3)
    assert scaled.std().item() == pytest.approx(1, rel=1e-3)
    config = latent_config()
    vae_config = AutoencoderConfig(source=str(tmp_path / "stamp_vae"))
    generator_config = config.generator.model_copy(update={"vae": vae_config})
    model = build_model(config.model_copy(update={"generator": generator_config}), FreezeConfig())
    materialize(model, "cpu")
    assert load_weights(model)
    assert model.generator.spec.latents.factor == 4


def test_autoencoder_requires_stamps(tmp_path):
    with pytest.raises(DataError, match="prepare tuxpaint_stamps first"):
        stamp_vae.prepare(tmp_path, tmp_path, stamp_vae.OPTIONS)
