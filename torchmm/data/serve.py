"""A producer: prepares samples for trainers on other processes or machines.

    python -m torchmm.data.serve --config recipe.toml --bind 127.0.0.1:7411 --workers 8

It opens the recipe's sources, which must exist on its machine, and answers requests that name
samples (see `torchmm.data.producers`) with tensors.

It listens only on its own machine, unless it has a certificate and a token. Like `train.py` this is
a program, which sees the whole recipe.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.processes import end_workers
from torchmm.recipe.data_section import is_local

if TYPE_CHECKING:
    from torchmm.data.producers.server import Producer

TOKEN_VARIABLE = "TORCHMM_DATA_TOKEN"
GRACE_S = 5.0

Certificate = tuple[bytes, bytes]
"""PEM certificate and private key."""


def check_exposure(bind: str, encrypted: bool, token: str | None) -> None:
    """Other machines may only ask with a token, over an encrypted connection.

    Raises:
        ConfigError: they could without.
    """
    if not is_local(bind) and not (encrypted and token):
        raise ConfigError(
            f"--bind {bind}: other machines could read the data; give --tls-certificate, --tls-key "
            f"and a secret in {TOKEN_VARIABLE}, or bind 127.0.0.1"
        )


def open_producer(
    arguments: argparse.Namespace,
    overrides: list[str],
    token: str | None,
    certificate: Certificate | None,
) -> Producer:
    """Opens what the recipe names, and begins to listen.

    Raises:
        ConfigError, DataError: that failed.
    """
    # Late: mistakes on the command line should not take the seconds that these need to load.
    from torchmm.data.producers.server import Producer  # noqa: PLC0415
    from torchmm.data.sources.open import open_samples  # noqa: PLC0415
    from torchmm.data.tokenizer import load_tokenizer  # noqa: PLC0415
    from torchmm.planning.resolved import recipe_model  # noqa: PLC0415
    from torchmm.recipe.read import load_recipe  # noqa: PLC0415

    recipe = load_recipe(arguments.config, overrides).recipe
    model = recipe_model(recipe)
    tokenizer = load_tokenizer(recipe.model)
    samples = open_samples(recipe.data, recipe.training, **model.sample_specs(tokenizer))
    return Producer(
        samples,
        recipe.training,
        arguments.bind,
        workers=arguments.workers,
        token=token,
        certificate=certificate,
    )


def _certificate(arguments: argparse.Namespace) -> Certificate | None:
    paths = (arguments.tls_certificate, arguments.tls_key)
    if not any(paths):
        return None
    if not all(paths):
        raise ConfigError("--tls-certificate and --tls-key need each other")
    try:
        certificate, key = (Path(path).read_bytes() for path in paths)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return certificate, key


def serve(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Answers until SIGTERM or SIGINT.

    Raises:
        ConfigError, DataError: it cannot begin.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    certificate = _certificate(arguments)
    check_exposure(arguments.bind, certificate is not None, token)
    producer = open_producer(arguments, overrides, token, certificate)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    sys.stdout.write(f"ready on port {producer.port}\n")
    sys.stdout.flush()
    stopped.wait()
    closing = threading.Thread(target=producer.close, daemon=True)  # waits for slow readers
    closing.start()
    closing.join(GRACE_S)
    end_workers(multiprocessing.active_children())


def main() -> NoReturn:
    """Parses the command line; exit codes are those of `train.py`."""
    parser = argparse.ArgumentParser(
        prog="python -m torchmm.data.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="recipe (TOML) of the run")
    parser.add_argument("--bind", default="127.0.0.1:7411", help="HOST:PORT to listen on")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--tls-certificate", help="PEM file of this machine's certificate")
    parser.add_argument("--tls-key", help="PEM file of its private key")
    arguments, overrides = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        serve(arguments, overrides)
    except TorchmmError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
