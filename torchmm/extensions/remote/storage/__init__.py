"""Local files and remote files (`s3://`, `gs://`, `hf://`) behind one interface."""
