"""Diffusion decoders: models, latents, targets and sampling."""
