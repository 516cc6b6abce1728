"""`[data.storage]`: cache and timeout of files at addresses."""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.section import Section


class StorageConfig(Section):
    """Cache and timeout of files at addresses (`s3://`, `gs://`, `hf://`, ...). Credentials come
    from the environment."""

    cache_dir: str | None = None
    """Directory on a local disk, shared by the processes of a machine, for what was read from
    elsewhere and for decoded parts of parquet files; default: `storage` in
    `data.index_cache_dir`."""
    cache_gb: float = Field(default=50.0, ge=0)
    """Most that is kept there, in units of 10^9 bytes; what was not used for longest goes first.
    0: nothing is kept, and checksums are not compared."""
    retry_timeout_s: float = Field(default=180.0, gt=0)
    """The run ends (exit code 3) when a store has not answered a request for this many seconds, in
    which it is asked again and again. Keep it below `data.timeout_s`. A copy of a checkpoint
    (`checkpoint.remote_dir`) is given up after the same time."""
