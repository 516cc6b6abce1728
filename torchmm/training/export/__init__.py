"""Export of checkpoints to Hugging Face directories with a model card."""
