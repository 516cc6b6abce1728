"""Parallelism: device meshes, FSDP2, tensor parallelism, activation checkpointing, health."""
