"""Section `[data.storage]`: cache and timeout of remote files."""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.section import Section


class StorageConfig(Section):
    """Cache and timeout of remote files (`s3://`, `gs://`, `hf://` and others).

    Credentials are read from the environment. See docs/reference/data.md.
    """

    cache_dir: str | None = None
    """Local directory that caches remote files and decoded parquet data. All processes of a node
    share it. If None, it is `storage` in `data.index_cache_dir`."""
    cache_gb: float = Field(default=50.0, ge=0)
    """Maximum cache size in GB (10^9 bytes). The least recently used files are deleted first. 0
    disables the cache and checksum comparison."""
    retry_timeout_s: float = Field(default=180.0, gt=0)
    """Time in seconds for which a failing request is retried before the run stops with exit code 3.
    Keep it below `data.timeout_s`. Checkpoint uploads (`checkpoint.remote_dir`) use the same limit,
    but do not stop the run."""
