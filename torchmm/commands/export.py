"""Export the model of a checkpoint as a Hugging Face directory, without GPUs.

    torchmm export outputs/mine                      # newest checkpoint
    torchmm export outputs/mine/checkpoints/step-400 --output mine --dtype bfloat16
    torchmm export outputs/mine --adapters separate  # PEFT files
    torchmm export outputs/mine --ema                # averaged weights (`ema_decay`)
    torchmm export outputs/mine --push me/mine --private

The checkpoint may have any parallelism layout. Tensors are assembled one at a time in files next to
the export, so the model does not have to fit in memory. `from_pretrained` of transformers loads the
directory if transformers has a class for the model. torchmm loads it as `[model] source`. In a
clone, `scripts/export.py` accepts the same arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmm.common.errors import CheckpointError, ConfigError, TorchmmError
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress
from torchmm.recipe.changes import RENAMED_ADAPTER_EXPORTS
from torchmm.training.checkpoint.manifest import checkpoints_at, step_of

EXPORT_DTYPES = ("bfloat16", "float16", "float32")
ADAPTER_EXPORTS = ("merged", "separate")


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint (step-N) or run directory")
    parser.add_argument(
        "--output",
        type=Path,
        help="directory to write (default: hf-N or hf-N-ema, next to the checkpoints)",
    )
    parser.add_argument(
        "--dtype",
        choices=EXPORT_DTYPES,
        help="data type of the weights (default: the data type of training)",
    )
    parser.add_argument(
        "--adapters",
        type=_check_adapters,
        metavar="{" + ",".join(ADAPTER_EXPORTS) + "}",
        default="merged",
        help="how to export LoRA adapters (default: merged)",
    )
    parser.add_argument("--ema", action="store_true", help="export the averaged weights")
    parser.add_argument(
        "--shard-gb",
        type=float,
        default=5.0,
        help="maximum size of a weight file in GB (default: 5)",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload the export to this repository of the Hugging Face Hub",
    )
    parser.add_argument(
        "--private", action="store_true", help="make the repository private if it is new"
    )
    options = parser.parse_args(arguments)
    log_to_console(make_console(stderr=True))
    try:
        output = export(
            options.checkpoint,
            options.output,
            dtype=options.dtype,
            adapters=options.adapters,
            ema=options.ema,
            shard_gb=options.shard_gb,
        )
        print(f"{output} is complete")
        if options.push is not None:
            from torchmm.training.export.checkpoint import push

            with report_progress("uploading"):
                url = push(output, options.push, options.private)
            print(f"uploaded to {url}")
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _check_adapters(value: str) -> str:
    """Return a valid value of `--adapters`.

    Raises:
        argparse.ArgumentTypeError: The value is invalid, or was renamed.
    """
    if value in ADAPTER_EXPORTS:
        return value
    if now := RENAMED_ADAPTER_EXPORTS.get(value):
        raise argparse.ArgumentTypeError(f'{value!r} was renamed to "{now}"')
    names = ", ".join(ADAPTER_EXPORTS)
    raise argparse.ArgumentTypeError(f"{value!r} is invalid; use one of: {names}")


def export(
    checkpoint: Path | str,
    output: Path | str | None = None,
    *,
    dtype: str | None = None,
    adapters: str = "merged",
    ema: bool = False,
    shard_gb: float = 5.0,
) -> Path:
    """Write a checkpoint as a Hugging Face directory, and return the directory.

    Args:
        checkpoint: Checkpoint (step-N), or the directory of a run, of which the newest checkpoint
            is used.
        output: Directory to create. If None, use hf-N (hf-N-ema) in the directory of the run.
        dtype: "bfloat16", "float16" or "float32". If None, use the dtype of the parameters.
        adapters: "merged" into the weights, or "separate" as PEFT files.
        ema: Whether to export the weights averaged over steps.
        shard_gb: Maximum size of a weight file in GB.

    Raises:
        CheckpointError: No checkpoint exists, or it is damaged.
        ConfigError: An argument is invalid, or the directory exists.
    """
    if dtype not in (None, *EXPORT_DTYPES):
        raise ConfigError(f"dtype = {dtype!r} is invalid; use one of: {', '.join(EXPORT_DTYPES)}")
    try:
        _check_adapters(adapters)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"adapters = {error}") from None
    with report_imports():
        from transformers.utils.logging import disable_progress_bar

        from torchmm.common.dtypes import DTYPES
        from torchmm.training.export.checkpoint import export_checkpoint

    disable_progress_bar()  # `report_progress` reports progress
    checkpoints = checkpoints_at(Path(checkpoint).resolve())
    if not checkpoints:
        raise CheckpointError(f"no checkpoint in {checkpoint}")
    path = checkpoints[0]
    name = f"hf-{step_of(path)}{'-ema' if ema else ''}"
    directory = path.parent.parent / name if output is None else Path(output)
    print(f"exporting {path} to {directory}")
    with report_progress("exporting"):
        export_checkpoint(
            path,
            directory,
            dtype=None if dtype is None else DTYPES[dtype],
            shard_bytes=int(shard_gb * 1e9),
            separate=adapters == "separate",
            averaged=ema,
        )
    return directory
