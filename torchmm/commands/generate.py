"""Generate text or images with a trained model.

    torchmm generate outputs/mine photo.png more.jpg             # one text per file
    torchmm generate outputs/mine a.png --prompt "A photo of" --prompt "The color is"
    torchmm generate outputs/mine a.png b.png --all-files --prompt "Compare." --template
    torchmm generate outputs/mine --prompt "Once upon a time" --temperature 0.8 --seed 3
    torchmm generate outputs/mine --chats chats.jsonl --json     # next message of each
    torchmm generate outputs/mine --chat                         # interactive chat
    torchmm generate outputs/mine --prompt "A red fish" --generate-images images/

The model is a run directory (newest checkpoint, or export), a checkpoint (step-N) or an export. An
export is a Hugging Face directory, or a directory with `torchmm.json` and separate components if
Hugging Face has no class for the model. Prompts are preprocessed like training data. Without
--temperature, the most likely token is selected. In a clone, `scripts/generate.py` accepts the same
arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress
from torchmm.recipe.changes import reject_renamed_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchmm.extensions.evaluation.text.load_model import TextGenerator
    from torchmm.extensions.evaluation.text.prompts import Request
    from torchmm.extensions.evaluation.text.sampling import Sampling

COMMANDS = "/file FILE adds a file to your next message, /new starts a new chat, /end exits"


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = _parser(prog)
    arguments = parser.parse_args(argv)
    log_to_console(make_console(stderr=True), only_progress=True)
    with report_imports():
        from torchmm.common.dtypes import DTYPES
        from torchmm.extensions.evaluation.text.load_model import (
            is_chat_checkpoint,
            load_text_generator,
        )
        from torchmm.extensions.evaluation.text.sampling import Sampling

    try:
        sampling = Sampling(
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            repetition_penalty=arguments.repetition_penalty,
            seed=arguments.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    try:
        talks = arguments.chat and arguments.generate_images is None
        if arguments.template is None and arguments.generate_images is None:
            arguments.template = is_chat_checkpoint(arguments.model)
        requests = [] if talks else _requests(arguments)
        with report_progress("opening the model"):
            writer = load_text_generator(arguments.model, DTYPES[arguments.dtype], arguments.ema)
        if arguments.generate_images is not None:
            _generate_images(writer, requests, arguments)
        elif arguments.chat:
            _chat(writer, sampling, arguments)
        else:
            _print_responses(writer, requests, sampling, arguments)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="run directory, checkpoint or export")
    parser.add_argument("files", type=Path, nargs="*", help="images, audio or video files")
    asked = parser.add_argument_group("prompts")
    asked.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="WORDS",
        help="prompt text, after the files; repeatable",
    )
    asked.add_argument("--all-files", action="store_true", help="use all files with each prompt")
    asked.add_argument(
        "--template",
        action=argparse.BooleanOptionalAction,
        help="send the prompt as a user message with the chat template (default: if the "
        "model was trained on chats)",
    )
    asked.add_argument("--chats", type=Path, help="JSON or JSON lines file with messages")
    asked.add_argument(
        "--chat",
        action="store_true",
        help="start an interactive chat; files belong to the first message",
    )
    asked.add_argument(
        "--generate-images",
        type=Path,
        metavar="DIR",
        help="generate an image for each prompt into DIR instead of text",
    )
    reject_renamed_options(parser, "generate")
    chosen = parser.add_argument_group("decoding")
    chosen.add_argument("--max-new-tokens", type=int, default=40, metavar="N", help="%(default)s")
    chosen.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 (default) selects the most likely token",
    )
    chosen.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; 0 (default) disables the limit",
    )
    chosen.add_argument("--top-p", type=float, default=1.0, metavar="P", help="%(default)s")
    chosen.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="penalty for repeated tokens; %(default)s (default) disables it",
    )
    chosen.add_argument("--seed", type=int, default=0, metavar="S", help="%(default)s")
    how = parser.add_argument_group("execution")
    how.add_argument(
        "--denoising-steps",
        type=int,
        default=25,
        metavar="N",
        help="denoising steps per image (default: %(default)s)",
    )
    how.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="number of prompts in one batch (default: 8)",
    )
    how.add_argument("--max-prompt-tokens", type=int, default=4096, metavar="N", help="%(default)s")
    how.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="float32", help="%(default)s"
    )
    how.add_argument("--ema", action="store_true", help="use the averaged weights of a checkpoint")
    how.add_argument(
        "--stream",
        action="store_true",
        help="print the text of a single prompt while it is generated",
    )
    how.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


def _requests(arguments: argparse.Namespace) -> list[Request]:
    from torchmm.extensions.evaluation.text.prompts import make_request, read_chats

    if arguments.generate_images is not None and (
        arguments.chats or arguments.chat or arguments.template
    ):
        raise ConfigError(
            "--generate-images requires text prompts; remove --chat, --chats and --template"
        )
    if arguments.chats is not None:
        if arguments.files or arguments.prompt:
            raise ConfigError(
                "--chats already contains files and prompts; remove files and --prompt"
            )
        return read_chats(arguments.chats)
    files: list[list[Path]] = [arguments.files]
    if arguments.files and not arguments.all_files:
        files = [[file] for file in arguments.files]
    return [
        make_request(files_of_prompt, prompt_text, as_chat=arguments.template)
        for files_of_prompt in files
        for prompt_text in arguments.prompt or [""]
    ]


def _generate_images(
    writer: TextGenerator, requests: list[Request], arguments: argparse.Namespace
) -> None:
    from torchmm.extensions.generation.sampling import generate_requested_images, save_image

    generated = generate_requested_images(
        writer,
        requests,
        steps=max(1, arguments.denoising_steps),
        seed=arguments.seed,
        max_prompt_tokens=arguments.max_prompt_tokens,
    )
    arguments.generate_images.mkdir(parents=True, exist_ok=True)
    for number, (request, frames) in enumerate(zip(requests, generated, strict=True)):
        file = save_image(frames, arguments.generate_images / str(number))
        if arguments.json:
            print(json.dumps({"asked": request.label, "file": str(file)}), flush=True)
        else:
            print(f"{request.label}: {file}", flush=True)


def _print_responses(
    writer: TextGenerator,
    requests: list[Request],
    sampling: Sampling,
    arguments: argparse.Namespace,
) -> None:
    """Print the text of each request, or show the only text while it is generated."""
    streams = arguments.stream and len(requests) == 1 and not arguments.json
    with ExitStack() as stack:
        stream = stack.enter_context(_ResponseStream(writer.tokenizer)) if streams else None
        texts = writer.write(
            requests,
            sampling,
            together=max(1, arguments.batch_size),
            max_prompt_tokens=arguments.max_prompt_tokens,
            on_tokens=stream,
        )
        for request, text in zip(requests, texts, strict=True):
            if arguments.json:
                line = {"asked": request.label, "text": text}
                print(json.dumps(line, ensure_ascii=False), flush=True)
            elif not streams:
                print(f"{request.label}: {text}", flush=True)


def _chat(writer: TextGenerator, sampling: Sampling, arguments: argparse.Namespace) -> None:
    """Run an interactive chat: read user messages from standard input until /end."""
    from torchmm.extensions.evaluation.text.prompts import chat_request, content_parts

    print(COMMANDS, file=sys.stderr)
    messages: list[dict[str, Any]] = []
    files: list[Path] = [*arguments.files]
    while (message := _read_line()) is not None:
        command, _, argument = message.partition(" ")
        if command == "/end":
            return
        if command == "/new":
            messages, files = [], []
            continue
        if command == "/file":
            files.append(Path(argument).expanduser())
            continue
        if not message:
            continue
        if missing := [str(file) for file in files if not file.is_file()]:
            print(f"no such file: {', '.join(missing)}", file=sys.stderr)
            files = [file for file in files if file.is_file()]
            continue
        user_message = {"role": "user", "content": content_parts(files, message)}
        request = chat_request("the chat", [*messages, user_message], Path())
        try:
            with _ResponseStream(writer.tokenizer) as stream:
                [text] = writer.write(
                    [request],
                    sampling,
                    max_prompt_tokens=arguments.max_prompt_tokens,
                    on_tokens=stream,
                )
        except TorchmmError as error:
            print(error, file=sys.stderr)
            continue
        except KeyboardInterrupt:  # the user stopped the generation
            continue
        files = []
        if text.strip():  # models are not trained on chats with empty responses
            messages += [user_message, {"role": "assistant", "content": text}]


def _read_line() -> str | None:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None


class _ResponseStream(AbstractContextManager["_ResponseStream"]):
    """Console output of a response during generation, with progress until the first token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers import TextStreamer

        self._streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        self._reading = ExitStack()

    def __enter__(self) -> Self:
        self._reading.enter_context(report_progress("reading prompts"))
        return self

    def __call__(self, tokens: Mapping[int, int]) -> None:
        import torch

        self._reading.close()
        for token in tokens.values():
            self._streamer.put(torch.tensor([token]))

    def __exit__(self, *error: object) -> None:
        self._reading.close()
        self._streamer.end()
