"""Random damage to checkpoints, and damage that the manifest does not reveal."""

import random
from pathlib import Path

from torchmm.training.checkpoint.manifest import WrittenFile, read_manifest, write_manifest


def damage(path: Path, rng: random.Random) -> str:
    """Damage a random file of a checkpoint in a random way and return a description."""
    file = rng.choice(sorted(path.iterdir()))
    data = bytearray(file.read_bytes())
    kind = rng.choice(["flip", "zero", "truncate", "grow", "missing", "swap"])
    offset = rng.randrange(len(data))
    if kind == "flip":
        data[offset] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        page = slice(offset, offset + 4096)
        data[page] = bytes(255 - b if b == 0 else 0 for b in data[page])
    elif kind == "truncate":
        del data[offset:]
    elif kind == "grow":
        data.append(0)
    if kind == "swap":
        other = rng.choice([p for p in sorted(path.iterdir()) if p != file])
        file.rename(path / "aside")
        other.rename(file)
        (path / "aside").rename(other)
    elif kind == "missing":
        file.unlink()
    else:
        file.write_bytes(data)
    return f"{kind} {file.name}"


def rewrite(path: Path, **facts) -> None:
    """Write another manifest for the same files, with correct hashes; None removes a key."""
    manifest = read_manifest(path)
    files = [WrittenFile(n, f["bytes"], f["sha256"]) for n, f in manifest.pop("files").items()]
    (path / "MANIFEST.json").unlink()
    merged = {**manifest, **facts}
    write_manifest(path, files, {k: v for k, v in merged.items() if v is not None})


class FullDisk:
    """Redirects writes to files whose names start with `name` to /dev/full."""

    def __init__(self, name: str, monkeypatch) -> None:
        real = Path.open

        def patched(path, mode="r", *args, **kwargs):
            full = "x" in mode and path.name.startswith(name)
            if not full:
                return real(path, mode, *args, **kwargs)
            return real(Path("/dev/full"), "wb", buffering=0)

        monkeypatch.setattr(Path, "open", patched)
