"""Diffusion decoders that generate images and videos."""
