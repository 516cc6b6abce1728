"""Device meshes, FSDP2, tensor parallelism, point-to-point messages, peer health."""
