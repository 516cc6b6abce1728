"""A producer: prepares samples for trainers on other processes or machines.

    python -m torchmm.data.serve --config recipe.toml --bind 127.0.0.1:7411 --workers 8

It opens the recipe's sources, which must exist on its machine, and answers requests that name
samples (see `torchmm.data.wire`) with tensors. It keeps no state and plans nothing: any number of
producers may run, be killed and be started again. It refuses more requests than it can work on, and
the trainer asks another producer (back-pressure). DistTrain §4.2.

It listens only on its own machine, unless it has a certificate and a token. Like `train.py` this is
a program, which sees the whole recipe.
"""

from __future__ import annotations

import argparse
import hmac
import logging
import os
import signal
import sys
import threading
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType
from typing import NoReturn

import grpc

from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.processes import fork_server, make_worker_setup
from torchmm.common.row_slices import Reads
from torchmm.data.decode import StepDecoder
from torchmm.data.items import PackItems
from torchmm.data.producers import METHOD, TOKEN_KEY, TOKEN_VARIABLE
from torchmm.data.wire import pack_step, unpack_request
from torchmm.recipe.data_section import is_local

QUEUED_PER_WORKER = 4
GRACE_S = 5.0

logger = logging.getLogger(__name__)

_decoder: list[StepDecoder] = []
"""The worker process's decoder, put there by its initializer."""


def _start_worker(decoder: StepDecoder, setup: object) -> None:
    assert callable(setup)
    setup(0)
    _decoder.append(decoder)


def _prepare_in_worker(microbatches: list[list[PackItems]], reads: Reads | None) -> bytes:
    return pack_step(_decoder[0].for_rank(reads).decode(microbatches))


class Producer(grpc.GenericRpcHandler):
    """Answers requests.

    Args:
        decoder: of the recipe's samples.
        fingerprint: of the data and how they are prepared.
        workers: processes that decode; 0: threads of this one.
        token: secret that requests must carry; None: none.
    """

    def __init__(
        self, decoder: StepDecoder, fingerprint: str, workers: int, token: str | None
    ) -> None:
        self._decoder = decoder
        self._fingerprint = fingerprint
        self._workers = workers
        self._token = token
        self._room = threading.BoundedSemaphore(QUEUED_PER_WORKER * max(workers, 1))
        self._lock = threading.Lock()
        self._pool = self._make_pool()

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """The handler of the one method there is."""
        if handler_call_details.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Prepares a step, or says why not."""
        self._check_token(context)
        try:
            asked = unpack_request(request)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if asked.fingerprint != self._fingerprint:
            text = (
                "it prepares other data: sources, tokenizer, model or limits differ between its "
                "recipe and the run's; start it with outputs/NAME/recipe.toml of the run"
            )
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if not self._room.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "it has no room for more requests")
        try:
            return self._prepare(asked.microbatches, asked.reads)
        except BrokenProcessPool:
            text = "its worker died; it has started another"
        finally:
            self._room.release()
        return context.abort(grpc.StatusCode.UNAVAILABLE, text)

    def close(self) -> None:
        """Ends the workers."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, microbatches: list[list[PackItems]], reads: Reads | None) -> bytes:
        if self._workers == 0:
            return pack_step(self._decoder.for_rank(reads).decode(microbatches))
        pool = self._pool
        try:
            return pool.submit(_prepare_in_worker, microbatches, reads).result()
        except BrokenProcessPool:
            logger.warning("a worker died; starting new ones")
            with self._lock:
                if self._pool is pool:  # the first of all requests that lost their worker
                    self._pool = self._make_pool()
            raise

    def _make_pool(self) -> Executor:
        if self._workers == 0:
            return ThreadPoolExecutor(1)  # has nothing to do
        return ProcessPoolExecutor(
            self._workers,
            mp_context=fork_server(),
            initializer=_start_worker,
            initargs=(self._decoder, make_worker_setup()),
        )

    def _check_token(self, context: grpc.ServicerContext) -> None:
        if self._token is None:
            return
        sent = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(str(sent).encode(), self._token.encode()):
            text = "wrong token" if sent else "no token"
            context.abort(grpc.StatusCode.UNAUTHENTICATED, text)


def start_server(
    producer: Producer,
    bind: str,
    *,
    threads: int = 16,
    max_request_mb: int = 64,
    credentials: grpc.ServerCredentials | None = None,
) -> tuple[grpc.Server, int]:
    """Begins to listen.

    Returns:
        The server, and its port (chosen by the system where `bind` says 0).

    Raises:
        ConfigError: the address is not available.
    """
    options = [
        ("grpc.max_receive_message_length", max_request_mb * 10**6),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.server(ThreadPoolExecutor(threads), [producer], options=options)
    try:
        secure = credentials is not None
        port = (
            server.add_secure_port(bind, credentials) if secure else server.add_insecure_port(bind)
        )
    except RuntimeError as error:
        raise ConfigError(f"--bind {bind}: {error}; is another producer running there?") from error
    server.start()
    return server, port


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
    arguments: argparse.Namespace, overrides: list[str], token: str | None
) -> Producer:
    """Opens what the recipe names.

    Raises:
        ConfigError, DataError: that failed.
    """
    # Late: mistakes on the command line should not take the seconds that these need to load.
    from torchmm.data.sources.open import open_samples  # noqa: PLC0415
    from torchmm.data.tokenizer import load_tokenizer  # noqa: PLC0415
    from torchmm.planning.resolved import recipe_model  # noqa: PLC0415
    from torchmm.recipe.read import load_recipe  # noqa: PLC0415

    recipe = load_recipe(arguments.config, overrides).recipe
    model = recipe_model(recipe)
    tokenizer = load_tokenizer(recipe.model)
    samples = open_samples(recipe.data, recipe.training, **model.sample_specs(tokenizer))
    return Producer(samples.decoder, samples.fingerprint(), arguments.workers, token)


def _credentials(arguments: argparse.Namespace) -> grpc.ServerCredentials | None:
    paths = (arguments.tls_key, arguments.tls_certificate)
    if not any(paths):
        return None
    if not all(paths):
        raise ConfigError("--tls-certificate and --tls-key need each other")
    try:
        key, certificate = (Path(path).read_bytes() for path in paths)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return grpc.ssl_server_credentials([(key, certificate)])


def serve(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Answers until SIGTERM or SIGINT.

    Raises:
        ConfigError, DataError: it cannot begin.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    credentials = _credentials(arguments)
    check_exposure(arguments.bind, credentials is not None, token)
    producer = open_producer(arguments, overrides, token)
    server, port = start_server(
        producer,
        arguments.bind,
        threads=QUEUED_PER_WORKER * max(arguments.workers, 1) + 2,
        max_request_mb=arguments.max_request_mb,
        credentials=credentials,
    )
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    sys.stdout.write(f"ready on port {port}\n")
    sys.stdout.flush()
    stopped.wait()
    server.stop(GRACE_S).wait()
    producer.close()


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
    parser.add_argument("--max-request-mb", type=int, default=64, help="largest request accepted")
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
