"""A small autoencoder trained on tuxpaint_stamps, for generators of latents.

The class is `AutoencoderKL` of diffusers, as in Stable Diffusion (Rombach et al., arXiv
2112.10752). It has a few hundred thousand parameters and no adversarial loss. Its loss is squared
error with small coefficients of absolute error and KL divergence. No package registry has a
published autoencoder. With absolute error alone, most reconstructions were brown (17.4 dB on
held-out images instead of 19.4 dB, one run each).
"""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from torchmm.common.errors import DataError, install_command
from torchmm.common.log import iterate_with_progress
from torchmm.data.media.images import decode_rgb
from torchmm.extensions.demo_data.manifest import new_directory, record_data_set

NAME = "stamp_vae"
SIZE_PX = 48
MAX_PIXELS = 50_000_000
STEPS = 600
BATCH_SIZE = 8
LEARNING_RATE = 2e-3
SQUARED_WEIGHT, ABSOLUTE_WEIGHT, DIVERGENCE_WEIGHT = 2.0, 0.2, 1e-4
SEED = 0
CONFIG: dict[str, Any] = {
    "block_out_channels": [16, 16, 32],
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "norm_num_groups": 8,
    "latent_channels": 4,
    "sample_size": SIZE_PX,
}
"""Config with four latents per 4 x 4 pixels, a twelfth of the number of values."""
OPTIONS = {
    "steps": STEPS,
    "config": CONFIG,
    "size_px": SIZE_PX,
    "weights": [SQUARED_WEIGHT, ABSOLUTE_WEIGHT, DIVERGENCE_WEIGHT],
}


def prepare(output: Path, packages: Path, options: dict[str, Any]) -> None:
    """Make `output`/stamp_vae: weights and config, as diffusers saves them.

    Args:
        output: Directory of all sets.
        packages: Not used.
        options: Options that are recorded in the manifest.

    Raises:
        DataError: Diffusers or OUTPUT/tuxpaint_stamps is missing.
    """
    try:
        from diffusers import AutoencoderKL  # noqa: PLC0415 - optional
    except ImportError as error:
        raise DataError(f"{NAME} requires diffusers; {install_command('generation')}") from error
    source = output / "tuxpaint_stamps"
    if not source.is_dir():
        raise DataError(f"{source} is missing; prepare tuxpaint_stamps first")
    train_images = _read_images(source / "train")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        vae: Any = AutoencoderKL(**CONFIG)
        _train(vae, train_images)
    with torch.no_grad():
        latents = vae.encode(train_images).latent_dist.mean
    scaling = {"scaling_factor": 1 / latents.std().item(), "shift_factor": latents.mean().item()}
    vae.register_to_config(**scaling)
    held_out = _read_images(source / "validation")
    with torch.no_grad():
        reconstructed = vae.decode(vae.encode(held_out).latent_dist.mean).sample.clamp(-1, 1)
    squared = functional.mse_loss(reconstructed, held_out).item()
    with new_directory(output / NAME) as directory:
        vae.save_pretrained(directory)
    counts = {
        "parameters": sum(p.numel() for p in vae.parameters()),
        "dB on held-out images": round(-10 * log10(squared / 4), 1),
    }
    record_data_set(
        output, NAME, [], "GPL-2 (license of its images)", {"options": options, "counts": counts}
    )


def _read_images(directory: Path) -> Tensor:
    """Return every image once, (N, 3, H, W) in [-1, 1]."""
    images_by_file: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.parquet")):
        for row in pq.read_table(file, columns=["image", "file"]).to_pylist():
            decoded_image = decode_rgb(row["image"]["bytes"], MAX_PIXELS)
            square = ImageOps.fit(decoded_image, (SIZE_PX, SIZE_PX), Image.Resampling.BICUBIC)
            images_by_file[row["file"]] = np.asarray(square)
    pixels = torch.from_numpy(np.stack(list(images_by_file.values()))).permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1


def _train(vae: Any, train_images: Tensor) -> None:
    """Train the autoencoder, with random horizontal flips."""
    optimizer = torch.optim.Adam(vae.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS)
    for _ in iterate_with_progress("training the autoencoder", range(STEPS), STEPS, "steps"):
        batch = train_images[torch.randint(len(train_images), (BATCH_SIZE,))]
        batch = batch.flip(-1) if torch.rand(()) < 0.5 else batch
        distribution = vae.encode(batch).latent_dist
        reconstructed = vae.decode(distribution.sample()).sample
        error = SQUARED_WEIGHT * functional.mse_loss(reconstructed, batch)
        error = error + ABSOLUTE_WEIGHT * functional.l1_loss(reconstructed, batch)
        divergence = distribution.kl().mean() / batch[0].numel()
        optimizer.zero_grad()
        (error + DIVERGENCE_WEIGHT * divergence).backward()
        optimizer.step()
        schedule.step()
