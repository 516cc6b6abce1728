"""Writes the model of a checkpoint as a Hugging Face directory, on any machine, without GPUs.

    python scripts/export.py outputs/mine                      # its newest checkpoint
    python scripts/export.py outputs/mine/checkpoints/step-400 --output mine --dtype bfloat16
    python scripts/export.py outputs/mine --adapters apart     # PEFT's files
    python scripts/export.py outputs/mine --ema                # weights averaged (`ema_decay`)
    python scripts/export.py outputs/mine --push me/mine --private

Whatever the layout that saved it: tensors are put together one by one, in files beside the
export, so that neither the model nor a rank's share of it has to fit into memory. The directory
opens with transformers' `from_pretrained` where the model has a class there, and here as
`[model] source`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmm.common.errors import CheckpointError, TorchmmError
from torchmm.common.log import loading, log_to_console, make_console, working
from torchmm.training.checkpoint.manifest import checkpoints_at, step_of


def main() -> int:
    """Exports the checkpoint named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint (step-N) or a run directory")
    parser.add_argument("--output", type=Path, help="default: hf-N or hf-N-ema, by the checkpoints")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: as it was trained"
    )
    parser.add_argument(
        "--adapters", choices=("merged", "apart"), default="merged", help="where there are any"
    )
    parser.add_argument("--ema", action="store_true", help="the averaged weights")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="of the largest file (5)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload it to Hugging Face's hub")
    parser.add_argument("--private", action="store_true", help="if that is a new repository")
    arguments = parser.parse_args()
    log_to_console(make_console(stderr=True))
    with loading():
        from transformers.utils.logging import disable_progress_bar

        from torchmm.common.dtypes import DTYPES
        from torchmm.training.exports.checkpoint import export_checkpoint, push

    disable_progress_bar()  # of shards: what takes long is told here
    try:
        found = checkpoints_at(arguments.checkpoint.resolve())
        if not found:
            raise CheckpointError(f"no checkpoint in {arguments.checkpoint}")
        path = found[0]
        name = f"hf-{step_of(path)}{'-ema' if arguments.ema else ''}"
        output = arguments.output or path.parent.parent / name
        print(f"exporting {path} to {output}")
        with working("exporting"):
            export_checkpoint(
                path,
                output,
                dtype=None if arguments.dtype is None else DTYPES[arguments.dtype],
                shard_bytes=int(arguments.shard_gb * 1e9),
                apart=arguments.adapters == "apart",
                averaged=arguments.ema,
            )
        print(f"{output} is complete")
        if arguments.push is not None:
            with working("uploading"):
                place = push(output, arguments.push, arguments.private)
            print(f"uploaded to {place}")
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
