"""File system of addresses (`s3://`, `gs://`, `hf://`) with a cache on the local disk."""
