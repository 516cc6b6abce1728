"""Run a producer, which prepares samples for trainers in other processes or on other hosts.

    python -m torchmm.data.serve --config recipe.toml --bind 127.0.0.1:7411 --workers 8

A producer opens the sources of the recipe, which must exist on its host. It responds to requests
for samples (see `torchmm.extensions.remote.producers`) with tensors.

It accepts only local connections, unless it has a certificate and a token. Like `train.py`, this is
a program that reads the complete recipe.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.processes import kill_workers
from torchmm.data.corrupt import escape_text
from torchmm.extensions.remote.producers.registry import StatusReporter
from torchmm.extensions.remote.producers.rpc import (
    TOKEN_VARIABLE,
    Certificate,
    check_exposure,
    read_certificate,
    read_key_pair,
    stop_event,
)
from torchmm.recipe.data_section import MAX_PRODUCER_WORKERS, is_host_port

if TYPE_CHECKING:
    from torchmm.extensions.remote.producers.server import Producer

SHUTDOWN_GRACE_S = 5.0


def open_configured_producer(
    arguments: argparse.Namespace,
    overrides: list[str],
    token: str | None,
    certificate: Certificate | None,
) -> Producer:
    """Open the sources of the recipe and start to listen.

    Raises:
        ConfigError, DataError: The sources or the address cannot be opened.
    """
    # Imported here, because these imports take seconds and mistakes on the command line are
    # reported first.
    from torchmm.data.tokenizer import load_tokenizer  # noqa: PLC0415
    from torchmm.extensions.remote.producers.server import open_producer  # noqa: PLC0415
    from torchmm.planning.recipe_model import recipe_model  # noqa: PLC0415
    from torchmm.recipe.read import load_recipe  # noqa: PLC0415

    recipe = load_recipe(arguments.config, overrides).recipe
    model = recipe_model(recipe)
    tokenizer = load_tokenizer(recipe.model)
    return open_producer(
        recipe.data,
        recipe.training,
        model.sample_specs(tokenizer),
        arguments.bind,
        workers=arguments.workers,
        token=token,
        certificate=certificate,
    )


def _start_reporter(arguments: argparse.Namespace, producer: Producer) -> StatusReporter | None:
    """Start to report to the registry, if the command line sets one. May raise ConfigError."""
    if arguments.registry is None:
        return None
    host = arguments.bind.rpartition(":")[0]
    address = arguments.advertise or f"{host}:{producer.port}"
    if host.strip("[]") in ("0.0.0.0", "::") and not arguments.advertise:
        raise ConfigError(
            f"--bind {arguments.bind}: set --advertise to the HOST:PORT at which this host is "
            "reachable"
        )
    certificate = read_certificate("--ca-certificate", arguments.ca_certificate)
    try:
        return StatusReporter(arguments.registry, partial(producer.load, address), certificate)
    except ConnectionError as error:
        raise ConfigError(
            f"--registry {arguments.registry}: {error}; set --ca-certificate"
        ) from error


def serve(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Serve requests until SIGTERM or SIGINT.

    Raises:
        ConfigError, DataError: The producer cannot start.
    """
    _check_arguments(arguments)
    token = os.environ.get(TOKEN_VARIABLE)
    certificate = read_key_pair(arguments.tls_certificate, arguments.tls_key)
    check_exposure(arguments.bind, certificate is not None, token)
    producer = open_configured_producer(arguments, overrides, token, certificate)
    reporter = _start_reporter(arguments, producer)
    stopped = stop_event()
    sys.stdout.write(f"ready on port {producer.port}\n")
    sys.stdout.flush()
    stopped.wait()
    if reporter is not None:
        reporter.close()
    closing = threading.Thread(target=producer.close, daemon=True)  # waits for slow readers
    closing.start()
    closing.join(SHUTDOWN_GRACE_S)
    kill_workers(multiprocessing.active_children())


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an address or the number of workers is invalid."""
    lowest_ports = {"bind": 0, "registry": 1, "advertise": 1}
    for name, lowest in lowest_ports.items():
        address = getattr(arguments, name)
        if address is not None and not is_host_port(address, lowest):
            raise ConfigError(
                f"--{name} {escape_text(address)}: is not a valid address; use HOST:PORT"
            )
    if not 0 <= arguments.workers <= MAX_PRODUCER_WORKERS:
        raise ConfigError(
            f"--workers {arguments.workers}: is out of range; use 0 to {MAX_PRODUCER_WORKERS}"
        )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Unknown options override keys of the recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m torchmm.data.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="recipe (TOML file) of the run")
    parser.add_argument("--bind", default="127.0.0.1:7411", help="address to listen on")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--tls-certificate", help="PEM file with the certificate of this host")
    parser.add_argument("--tls-key", help="PEM file with its private key")
    parser.add_argument("--registry", help="address of the registry")
    parser.add_argument(
        "--advertise", help="address of this producer for other hosts, if it differs from --bind"
    )
    parser.add_argument(
        "--ca-certificate", help="PEM file with the certificate authority of the registry"
    )
    return parser


def main() -> NoReturn:
    """Run the command line, and exit with an exit code of `train.py`."""
    arguments, overrides = make_parser().parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        serve(arguments, overrides)
    except TorchmmError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
