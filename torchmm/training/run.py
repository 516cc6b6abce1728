"""Run a recipe from start to exit: checks, process group, components, and training loop.

All unsupported settings (parallelism degrees, model, stages) are rejected before the rendezvous of
the ranks. Then the process group starts, `build` builds the components of the run, and `trainer`
runs the training loop. `shutdown` writes the final state to STATUS.json.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from torchmm.common.errors import EXIT_DONE, TorchmmError
from torchmm.common.extensions import find_entries
from torchmm.common.files import make_writable_directory
from torchmm.common.log import log_to_console, make_console, report_progress
from torchmm.common.processes import kill_workers, read_launch_environment
from torchmm.data.samples import sample_service, uses_shared_reader
from torchmm.data.shared_reader import ReaderAddress, SharedReader
from torchmm.models.multimodal import MultimodalModel, SampleSpecs
from torchmm.parallel.compilation import set_compile_cache
from torchmm.parallel.gather import gather_texts, ranks_on_host
from torchmm.parallel.health.peers import peer_errors
from torchmm.parallel.health.preflight import check_separate_devices
from torchmm.parallel.mesh import (
    select_device,
    start_process_group,
    use_expandable_segments,
)
from torchmm.parallel.p2p import check_hardware_queues, reserve_hardware_queues
from torchmm.pipelining.run.runtime import channel_streams
from torchmm.planning.choices import choose_data_balancing, choose_sizes
from torchmm.planning.resolved_recipe import ResolvedRecipe, resolve_recipe
from torchmm.planning.run_length import resolve_epochs
from torchmm.recipe.recipe import Recipe
from torchmm.training.build import build_run
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.components import RunComponents
from torchmm.training.export.atomic_directory import remove_unfinished
from torchmm.training.model_build import build_meta_model, choose_model_stages
from torchmm.training.shutdown import (
    Status,
    StopSignal,
    report_status,
    startup_errors,
    training_errors,
    write_failure,
    write_status,
)
from torchmm.training.trainer import Trainer


def train(recipe: Recipe) -> int:
    """Run a recipe on this rank and return the exit code. STATUS.json has the final state.

    Raises:
        TorchmmError: The run stopped early. STATUS.json is written.
    """
    run_dir = Path(recipe.output_dir) / recipe.name
    rank = read_launch_environment().rank
    directory = CheckpointDirectory(run_dir / "checkpoints", logging.getLogger("torchmm"))
    trainer = None

    def exit_with(error: TorchmmError) -> None:
        """End the process from another thread, because the main thread does not return."""
        logging.getLogger("torchmm").error("%s", error)
        write_failure(run_dir, error, trainer.step if trainer else 0, rank, directory)
        directory.release()
        kill_workers(multiprocessing.active_children())
        os._exit(error.exit_code)

    try:
        with StopSignal() as stop, startup_errors(run_dir), ExitStack() as exit_stack:
            with stop.interrupt_main_thread(exit_with):
                components = _prepare(recipe, directory, exit_stack)
                trainer = Trainer(components, stop, exit_with)
            with training_errors(run_dir):
                trainer.run()
        if rank == 0:
            messages = trainer.state.end_reason, components.checkpoints.status_warning
            message = ". ".join(filter(None, messages))
            report_status(run_dir, Status("done", trainer.step, 0, 0, message))
    except BaseException as error:
        write_failure(run_dir, error, trainer.step if trainer else 0, rank, directory)
        raise
    finally:
        _finish_run(recipe, directory, rank)
    dist.destroy_process_group()
    return EXIT_DONE


def _prepare(
    recipe: Recipe, directory: CheckpointDirectory, exit_stack: ExitStack
) -> RunComponents:
    """Build all components that the first step requires. Collective from the process group on.

    Args:
        recipe: Recipe of the run.
        directory: Checkpoints of the run.
        exit_stack: Exit stack that closes the started services at the end of the run.
    """
    run_dir = directory.path.parent
    rank, world_size = read_launch_environment()
    make_writable_directory(run_dir)  # every rank checks, so that no rank waits for a failed rank
    # No file is written into the directory of another active run.
    if rank == 0 and directory.try_lock():
        remove_unfinished(run_dir)
        write_status(run_dir, Status("running", 0, 0))  # replaces the status of an earlier run
    reserve_hardware_queues()
    set_compile_cache()
    log_to_console(make_console(), rank)
    run, model, tokenizer = _resolve_before_rendezvous(recipe, world_size)
    specs = model.sample_specs(tokenizer)
    service = sample_service(recipe.data)
    if rank == 0 and service is not None:
        exit_stack.enter_context(service.start(recipe.training, specs))
    device = select_device(recipe.training.device)
    use_expandable_segments(device, recipe.parallel)
    model_stages = choose_model_stages(run, model, tokenizer, device)
    if device.type == "cuda":
        check_hardware_queues(channel_streams(model_stages.layout))
    with peer_errors(rank):
        start_process_group(recipe.parallel, device)
        check_separate_devices(device)
        streams = exit_stack.enter_context(shared_reader(recipe, specs))
        return build_run(run, run_dir, device, model, tokenizer, model_stages, directory, streams)


@report_progress("searching parallelism degrees, and building the model without weights")
def _resolve_before_rendezvous(
    recipe: Recipe, world_size: int
) -> tuple[ResolvedRecipe, MultimodalModel, PreTrainedTokenizerBase]:
    run = resolve_recipe(choose_sizes(recipe, world_size), world_size)
    model, tokenizer = build_meta_model(run)
    run = run.with_recipe(resolve_epochs(run.recipe, model, tokenizer))
    return choose_data_balancing(run, model), model, tokenizer


def _finish_run(recipe: Recipe, directory: CheckpointDirectory, rank: int) -> None:
    """Call the entries of "run_ends" on rank 0, then release the run directory.

    STATUS.json has the final state. The argument of `is_used` is the recipe, and that of the target
    is the run directory. A target must not fail, because the run may have failed already.
    """
    if rank == 0 and directory.is_locked_by_this_run():
        for entry in find_entries("run_ends"):
            if entry.is_used(recipe):
                entry.load()(directory.path.parent)
    directory.release()


@contextmanager
def shared_reader(recipe: Recipe, specs: SampleSpecs) -> Iterator[ReaderAddress | None]:
    """Yield the address of the process that reads streams for all ranks of this host.

    The first rank of each host starts this process. Yields None without streams, or with one rank
    on the host. All ranks enter this context manager together.

    Args:
        recipe: Recipe of the run.
        specs: Further arguments of `open_samples`.

    Raises:
        DataError: The process cannot be started.
    """
    if not uses_shared_reader(recipe.data):
        yield None
        return
    local_ranks = ranks_on_host()
    started = None
    if len(local_ranks) > 1 and local_ranks[0] == dist.get_rank():
        started = SharedReader(recipe.data, recipe.training, specs, secrets.token_hex())
    message = gather_texts(json.dumps(started.address if started else None))[local_ranks[0]]
    try:
        address = json.loads(message)
        yield address and ReaderAddress(*address)
    finally:
        if started is not None:
            started.close()
