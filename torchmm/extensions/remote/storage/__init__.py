"""Access files at URLs (`s3://`, `gs://`, `hf://`), with a cache on the local disk."""
