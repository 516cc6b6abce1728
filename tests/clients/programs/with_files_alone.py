"""Read exports with safetensors and tokenizers only, without transformers and torch.

python with_files_alone.py JOBS ANSWERS    (both JSON)
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from safetensors import safe_open
from tokenizers import Tokenizer


def read(job: dict) -> dict:
    """Return shapes of tensors by name, and the ids of a text."""
    directory = Path(job["directory"])
    with safe_open(directory / "model.safetensors", "numpy") as opened:
        names = opened.keys()
        shapes = {name: list(opened.get_slice(name).get_shape()) for name in names}
        finite = all(opened.get_tensor(name).dtype.kind == "f" for name in names)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(job["answer"], add_special_tokens=False).ids
    return {"shapes": shapes, "numbers": finite, "text_ids": ids}


def main() -> None:
    """Run all jobs."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    answers = {job["family"]: read(job) for job in jobs}
    loaded = {"torch", "transformers"} & set(sys.modules)
    versions = {name: version(name) for name in ("safetensors", "tokenizers")}
    result = {"versions": versions, "answers": {"files": answers}, "loaded": sorted(loaded)}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
