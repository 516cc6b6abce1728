"""Files wherever they lie: on this machine, or at addresses (`s3://`, `gs://`, `hf://`, ...).

Begin with `remote_files.py`, whose files can be used like paths of this machine; `clients.py` asks
stores and asks again, `block_cache.py` keeps what came, within bounds and with checksums.
Imports `common` and `recipe`.
"""

from torchmm.common.faces import public

__all__, __getattr__ = public(
    __name__,
    {
        "remote_files": ("RemoteFile", "RemoteFolder", "Storage"),
    },
)
