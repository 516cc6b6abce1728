"""Writes text for images with an exported model.

    python scripts/generate.py outputs/quickstart/hf picture.png [more.png ...] [--prompt "..."]

Reads what a run exports: a Hugging Face directory, or, for pairs that have no Hugging Face class,
a directory of parts with `torchmm.json`. Images are prepared exactly as in training.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from torchmm.common.errors import TorchmmError
from torchmm.data.loader import build_loader
from torchmm.data.tokenizer import read_tokenizer
from torchmm.models.hf.export import PARTS_FILE
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.parallel.mesh import build_mesh, select_device, start_process_group
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.model_section import FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import TrainingConfig
from torchmm.training.pipeline import whole_pipeline
from torchmm.training.validation import generate_samples, held_out_prompts


def main() -> int:
    """Generates for the images named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="export directory (hf/ of a run)")
    parser.add_argument("images", type=Path, nargs="+")
    parser.add_argument("--prompt", default="", help="text after the image")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    arguments = parser.parse_args()
    missing = [str(i) for i in arguments.images if not i.is_file()]
    if missing:
        print(f"no such image: {', '.join(missing)}", file=sys.stderr)
        return 2
    try:
        _generate(arguments)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _generate(arguments: argparse.Namespace) -> None:
    device = select_device("auto")
    start_process_group(ParallelConfig(), device)
    mesh = build_mesh(ParallelConfig(), device)
    config, tokenizer_dir = _read_config(arguments.model)
    tokenizer = read_tokenizer(f"tokenizer of {tokenizer_dir}", tokenizer_dir)
    model = _load(config, device)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "images.jsonl"
        # The text is a placeholder: generation starts in front of it.
        rows = [
            {"image": _copy(image, Path(scratch), number), "text": "?"}
            for number, image in enumerate(arguments.images)
        ]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        loader = build_loader(
            DataConfig(
                validation=[SourceConfig(path=str(source), prompt=arguments.prompt)],
                workers=0,
                index_cache=scratch,
            ),
            TrainingConfig(global_batch_size=1, sequence_length=4096),
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
            validation=True,
            **model.sample_specs(tokenizer),
        )
        prompts = held_out_prompts(loader, len(rows))
        pipeline = whole_pipeline(model, mesh, torch.float32)
        texts = generate_samples(pipeline, prompts, tokenizer, mesh, arguments.max_new_tokens)
    for text in sorted(texts, key=lambda t: t.index):
        print(f"{arguments.images[text.index]}: {text.generated}")


def _copy(image: Path, scratch: Path, number: int) -> str:
    """Image paths of a JSONL source may not leave its directory."""
    name = f"{number}{image.suffix}"
    shutil.copy(image, scratch / name)
    return name


def _read_config(directory: Path) -> tuple[ModelConfig, Path]:
    parts = directory / PARTS_FILE
    if not parts.is_file():
        return ModelConfig(source=str(directory)), directory
    return ModelConfig.model_validate(_absolute(json.loads(parts.read_text()), directory)), (
        directory / "llm"
    )


def _absolute(value: object, directory: Path) -> object:
    """`source` and `tokenizer` paths of the parts are relative to their directory."""
    if not isinstance(value, dict):
        return value
    return {
        key: str(directory / item)
        if key in ("source", "tokenizer") and isinstance(item, str)
        else _absolute(item, directory)
        for key, item in value.items()
    }


def _load(config: ModelConfig, device: torch.device) -> MultimodalModel:
    model = build_model(config, FreezeConfig())
    materialize(model, device)
    init_weights(model, seed=0, skip=load_weights(model))
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
