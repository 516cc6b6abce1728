"""Run a registry, to which producers report their addresses and load.

    python -m torchmm.data.registry --bind 10.0.0.7:7410 --tls-certificate PEM --tls-key PEM

Use it for producers and ranks on several hosts (`data.producers.registry`). A run on one host
starts its registry itself. A registry is independent of recipes and can be restarted at any time.
Other hosts can connect only if it has a certificate and a token.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import NoReturn

from torchmm.common.errors import ConfigError
from torchmm.extensions.remote.producers.registry import Registry
from torchmm.extensions.remote.producers.rpc import (
    TOKEN_VARIABLE,
    check_exposure,
    read_key_pair,
    stop_event,
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m torchmm.data.registry",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bind", default="127.0.0.1:7410", help="address to listen on")
    parser.add_argument("--tls-certificate", help="PEM file with the certificate of this host")
    parser.add_argument("--tls-key", help="PEM file with its private key")
    return parser


def main() -> NoReturn:
    """Serve requests until SIGTERM or SIGINT, and exit with an exit code of `train.py`."""
    arguments = make_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopped = stop_event()
    try:
        token = os.environ.get(TOKEN_VARIABLE)
        certificate = read_key_pair(arguments.tls_certificate, arguments.tls_key)
        check_exposure(arguments.bind, certificate is not None, token)
        registry = Registry(arguments.bind, token, certificate)
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(f"ready on port {registry.port}\n")
    sys.stdout.flush()
    stopped.wait()
    registry.shutdown()
    sys.exit(0)


if __name__ == "__main__":
    main()
