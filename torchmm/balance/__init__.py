"""Pure cost functions of modules and batches; no torch.distributed."""
