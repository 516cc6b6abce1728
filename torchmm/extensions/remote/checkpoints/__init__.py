"""Upload, download and remove checkpoints in remote storage."""
