"""Saving and resuming with atomic checkpoints, between any parallelism configs.

A save copies all tensors to CPU memory (asynchronous) or uses them directly. DCP assigns chunks to
ranks, and one rename commits the checkpoint (see `storage`). Ranks communicate over a separate gloo
group during a save. A background thread on the training group would interleave its collectives with
those of the step. With `checkpoint.remote_dir`, committed checkpoints are uploaded (`copies`). A
start also finds uploaded checkpoints, on machines that share no files with the earlier run.

Tensor names are independent of the parallelism config: "model.FQN" for parameters and persistent
buffers, "optimizer.FQN.NAME" for optimizer states, "ema.FQN" for averages of parameters,
"rng.rank-R-of-W.NAME" for random states. Optimizer hyperparameters come from the recipe and are not
saved.

Two functions of DCP are not used. `get_optimizer_state_dict` runs an optimizer step to create the
state of parameters that are frozen or new. `dcp.async_save` does not hash or commit
the files.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchmm.common.errors import CheckpointError, PeerError
from torchmm.common.files import canonical_json, sync_directory, write_synced
from torchmm.common.log import report_progress
from torchmm.common.rng import capture_rng
from torchmm.parallel.health.peers import SideGroup, is_peer_failure
from torchmm.recipe.data_section import DataConfig, local_path
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.load import (
    STATE_NAME,
    RestoredRun,
    as_checkpoint_error,
    format_bullet_list,
    installed_versions,
    load_verified,
    rng_prefix,
)
from torchmm.training.checkpoint.manifest import (
    MANIFEST_NAME,
    WrittenFile,
    find_problems,
    list_steps,
    read_manifest,
    reject_newer_format,
    step_of,
    write_manifest,
)
from torchmm.training.checkpoint.save_metrics import SaveMeter
from torchmm.training.checkpoint.shared_filesystem import DirectoryGroup
from torchmm.training.checkpoint.state import (
    average_tensors,
    model_tensors,
    optimizer_tensors,
    trainable_names,
)
from torchmm.training.checkpoint.storage import SafetensorsWriter
from torchmm.training.checkpoint.store import (
    CheckpointStore,
    Uploads,
    is_uploaded_checkpoint,
    open_store,
    step_of_upload_folder,
    upload_folder_name,
)
from torchmm.training.optimizers.weight_average import WeightAverage

_EXIT_WAIT_S = 60.0


class CheckpointManager:
    """Checkpoints of one run directory. A context manager.

    All methods except `failed` and `wait` communicate: all ranks call them in the same order.

    Args:
        config: Section [checkpoint] of the recipe.
        run_dir: Directory of the run. Checkpoints are in `run_dir`/checkpoints/step-N.
        logger: Logger of the run.
        layout: Sizes of the parallel dimensions, for the manifest.
        recipe_sha256: Digest of the recipe, for the manifest. Resuming logs a different digest.
        recipe: Resolved recipe, for the manifest. Resuming logs different keys.
        directory: Checkpoints of `run_dir`, if the caller claims and releases them on rank 0.
        data: Section with the settings of remote storage. Defaults to the default section.

    Raises:
        ConfigError: `config.remote_dir` or `config.staging_dir` cannot be used.
        InUseError: Another active process writes to the same run directory.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        logger: logging.Logger,
        layout: dict[str, int],
        recipe_sha256: str,
        recipe: dict[str, Any] | None = None,
        directory: CheckpointDirectory | None = None,
        data: DataConfig | None = None,
    ) -> None:
        self._config = config
        self._logger = logger
        self._data = data or DataConfig()
        self._meter = SaveMeter()
        self._group = SideGroup.create()
        self._facts: dict[str, Any] = {
            "layout": layout,
            "recipe_sha256": recipe_sha256,
            "recipe": recipe or {},
            "torch": str(torch.__version__),
            "versions": installed_versions(),
            "world_size": self._group.size,
        }
        options = StagingOptions(
            use_pinned_memory=torch.cuda.is_available(),
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        run = directory or CheckpointDirectory(run_dir / "checkpoints", logger)
        self._locked_directories = [run] if directory is None else []
        self._group.run_on_rank_zero(run.acquire_lock)
        self._directory = run
        self._directory_group = DirectoryGroup.of_all_ranks(self._group)
        self._uploads: Uploads | None = None
        if config.remote_dir is None:
            return
        # With uploaded checkpoints, ranks may write to the disks of their nodes.
        name = run_dir.name
        path = run.path if config.staging_dir is None else local_path(config.staging_dir) / name
        self._directory_group = DirectoryGroup.find(self._group, path)
        is_partial = self._directory_group.size < self._group.size
        if is_partial or path != run.path:
            self._directory = CheckpointDirectory(path, logger, is_partial)
            self._locked_directories.append(self._directory)
            self._directory_group.run_on_local_leaders(self._directory.acquire_lock)
        self._remote = open_store(f"{config.remote_dir}/{name}", self._data, logger)
        self._uploads = self._remote.start_uploads(config.keep_latest, self._best, self._meter)

    def _best(self) -> list[int]:
        """Return the steps of the checkpoints to retain at any age."""
        return self._directory.best(self._config.keep_best)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Close the manager. After an error, only wait for a running save, up to `_EXIT_WAIT_S`.

        The next start would resume from that save. After the loss of a peer, it cannot finish.
        """
        if error is None:
            self.close()
        elif not isinstance(error, PeerError):
            if self._thread is not None:
                self._thread.join(_EXIT_WAIT_S)
            if self._uploads is not None:
                self._uploads.wait(_EXIT_WAIT_S)

    @property
    def failed(self) -> bool:
        """True if a background save of this rank has failed. `wait` raises the error.

        Not collective: ranks synchronize it in the reduction of a step, then all call `wait`.
        """
        return self._failure is not None

    @property
    def status_warning(self) -> str:
        """Checkpoint that could not be uploaded, and the reason. Empty without failures."""
        return "" if self._uploads is None else self._uploads.status_warning

    def pop_metrics(self) -> dict[str, Any]:
        """Return the metrics of the saves and uploads that finished since the last call."""
        return self._meter.pop()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        figures: Mapping[str, float | None] = MappingProxyType({}),
        average: WeightAverage | None = None,
    ) -> None:
        """Save a step. Return when the values are copied (asynchronous) or committed.

        A step that already has a checkpoint is not saved again.

        Args:
            step: Step to save.
            model: Model with the stages of this rank.
            optimizer: Optimizer of these stages.
            state: JSON object, identical on all ranks (loader state and other progress).
            figures: Metrics of the step that select the best checkpoints.
            average: Averages of the weights.

        Raises:
            CheckpointError: This save or the previous save failed. Committed checkpoints are
                intact, and the next save may succeed.
            PeerError: A rank was lost during the save.
        """
        began_s = time.perf_counter()
        self.wait()
        target = self._directory.path / f"step-{step}"
        exists = self._group.rank == 0 and target.is_dir()
        copying = self._uploads is not None and self._uploads.in_use is not None
        known = self._group.gather((exists, copying))
        if known[0][0]:
            self._logger.info("%s already exists; not saving it again", target)
            return
        if torch.cuda.is_available():
            # Copies of optimizer states to host memory may still be running after the update. Only
            # the compute stream waits for these copies (`low_precision/cpu_offload.py`).
            torch.cuda.current_stream().synchronize()
        tensors = model_tensors(model) | optimizer_tensors(model, optimizer.state)
        if average is not None:
            tensors |= average_tensors(model, average.averages)
        tensors |= {rng_prefix(self._group) + key: value for key, value in capture_rng().items()}
        note = {
            "step": step,
            "state": state,
            "state_sha256": hashlib.sha256(canonical_json(state)).hexdigest(),
            "trainable": trainable_names(model, optimizer),
            "figures": {name: value for name, value in figures.items() if value is not None},
        }
        write = partial(
            self._write, target, note=note, began_s=began_s, copy=not any(c for _, c in known)
        )
        if self._config.async_save:
            staged = cast(dict[str, Tensor], self._stager.stage(tensors))

            def write_in_background() -> None:
                try:
                    write(staged)
                except BaseException as error:  # `wait` raises it
                    self._failure = error

            self._thread = threading.Thread(target=write_in_background, daemon=True)
            self._thread.start()
        else:
            write(tensors)
        self._meter.record(checkpoint_wait_ms=(time.perf_counter() - began_s) * 1e3)

    def wait(self) -> None:
        """Wait for a running save. If it failed, raise its error once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finish saves and uploads, upload the newest checkpoint, and release the directory."""
        try:
            self.wait()
            if self._uploads is not None:
                self._uploads.finish()
        finally:
            self._stager.close()
            for directory in self._locked_directories:
                directory.release()

    @report_progress("verifying and loading the newest checkpoint")
    def resume(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        restarted: bool = False,
        average: WeightAverage | None = None,
    ) -> RestoredRun | None:
        """Load the checkpoint that `config.resume` selects. Return None for a new run.

        Checkpoints of later steps are renamed, because training repeats these steps. Otherwise the
        next resume would select them, and retention would count them.

        Args:
            model: Model with the stages of this rank.
            optimizer: Optimizer of these stages.
            restarted: Whether torchrun has restarted this process. If it has restarted any rank,
                `config.resume` is ignored and "auto" applies. Nodes have separate restart counts.
            average: Averages to replace. They are initialized again if the checkpoint has none.

        Raises:
            CheckpointError: The named checkpoint, or with "auto" every checkpoint, is unusable.
        """
        choice = "auto" if any(self._group.gather(restarted)) else self._config.resume
        restored = None
        path: Path | None
        if choice == "auto":
            path = self.latest_valid()
            if path is not None:
                restored = self._load_verified(path, model, optimizer, average)
        elif choice != "none" and is_uploaded_checkpoint(choice):
            remote_dir, _, folder = choice.rstrip("/").rpartition("/")
            step_of_upload_folder(folder)  # raises CheckpointError
            path, problems = self._fetch(open_store(remote_dir, self._data, self._logger), folder)
            if problems:
                raise CheckpointError(f"{choice} cannot be loaded:\n{format_bullet_list(problems)}")
            restored = self._load_verified(path, model, optimizer, average)
        elif choice != "none":
            restored = self.load(local_path(choice), model, optimizer, average)
        step = -1 if restored is None else restored.step
        self._directory_group.run_on_local_leaders(lambda: self._directory.set_aside_after(step))
        if self._uploads is not None:
            folder_to_retain = None
            if restored is not None:
                saved = restored.path
                folder_to_retain = self._group.run_on_rank_zero(
                    lambda: upload_folder_name(read_manifest(saved))
                )
            self._group.run_on_rank_zero(
                lambda: self._remote.set_aside_after(step, folder_to_retain)
            )
            if restored is not None and restored.path.parent == self._directory.path:
                self._uploads.resumed(restored.path)
        return restored

    def latest_valid(self) -> Path | None:
        """Return the newest intact checkpoint, or None without checkpoints.

        Uploaded checkpoints are candidates, too. They are downloaded if they are newer than all
        local checkpoints, or if the local checkpoint of the same step is damaged.

        Raises:
            CheckpointError: A newer version wrote a checkpoint, all checkpoints are damaged, or the
                remote storage does not respond.
        """

        def find_candidates() -> list[Path | str]:
            # Newest first. For the same step, the local checkpoint is first.
            entries: list[tuple[int, bool, Path | str]] = [
                (step_of(path) or 0, True, path) for path in list_steps(self._directory.path)
            ]
            if self._uploads is not None:
                stored = self._remote.committed()
                entries += [(step_of_upload_folder(folder), False, folder) for folder in stored]
            entries.sort(key=lambda entry: entry[:2], reverse=True)
            return [candidate for _, _, candidate in entries]

        candidates = self._group.run_on_rank_zero(find_candidates)
        for candidate in candidates:
            if isinstance(candidate, Path):
                path = candidate
                self._group.run_on_rank_zero(partial(reject_newer_format, path))
                problems = self._find_problems(path)
            else:
                self._logger.info("fetching %s/%s", self._remote.address, candidate)
                path, problems = self._fetch(self._remote, candidate)
            if not problems:
                return path
            self._logger.error("SKIPPING CORRUPT CHECKPOINT %s: %s", candidate, "; ".join(problems))
        if candidates:
            raise CheckpointError(
                f"all {len(candidates)} checkpoints in {self._directory.path} are corrupt; "
                'set checkpoint.resume = "none" to start a new run'
            )
        return None

    def _fetch(self, store: CheckpointStore, folder: str) -> tuple[Path, list[str]]:
        return store.fetch_checkpoint(folder, self._directory, self._directory_group, self._group)

    def load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        average: WeightAverage | None = None,
    ) -> RestoredRun:
        """Verify a checkpoint of any parallelism config and load it in place.

        Args:
            path: The checkpoint.
            model: Model with the stages of this rank.
            optimizer: Optimizer whose state is replaced. If None, load only the model.
            average: Averages to replace. They are initialized again if the checkpoint has none.

        Raises:
            CheckpointError: The checkpoint is damaged, or names, shapes or dtypes differ. The error
                lists all problems, and nothing is loaded.
        """
        problems = self._find_problems(path)
        if problems:
            raise CheckpointError(f"{path} cannot be loaded:\n{format_bullet_list(problems)}")
        return self._load_verified(path, model, optimizer, average)

    def _find_problems(self, path: Path) -> list[str]:
        """Return the problems of a checkpoint. Ranks divide the files of their site. Collective."""
        local_problems = find_problems(path, self._directory_group.rank, self._directory_group.size)
        return sorted(
            {problem for of_rank in self._group.gather(local_problems) for problem in of_rank}
        )

    def _load_verified(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        average: WeightAverage | None,
    ) -> RestoredRun:
        return load_verified(
            path, model, optimizer, self._group, self._facts, self._logger, average
        )

    def _write(
        self,
        target: Path,
        tensors: dict[str, Tensor],
        note: dict[str, Any],
        began_s: float,
        copy: bool,
    ) -> None:
        """Write and commit a checkpoint. Start to upload it if `copy` is True."""
        writer = SafetensorsWriter(target, self._group.rank, note, self._commit)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            dcp.save(
                tensors,
                storage_writer=writer,
                planner=planner,
                process_group=self._group.group,
                no_dist=self._group.group is None,
            )
        except CheckpointException as error:
            if self._directory_group.is_leader:
                writer.discard()
            raise as_checkpoint_error(
                f"cannot save {target} (earlier checkpoints are intact)", error
            ) from error
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            raise PeerError(f"a rank was lost while saving {target}: {error}") from error
        self._meter.record(checkpoint_save_ms=(time.perf_counter() - began_s) * 1e3)
        if self._directory_group.size < self._group.size:
            # Rank 0 has committed the files of its node. Other nodes do so with the same manifest.
            temporary = writer.temporary
            assert temporary is not None
            manifest = self._group.run_on_rank_zero((target / MANIFEST_NAME).read_bytes)

            def commit() -> None:
                if self._group.rank > 0:
                    write_synced(temporary / MANIFEST_NAME, manifest)
                    sync_directory(temporary)
                    self._directory.replace(temporary)

            self._directory_group.run_on_local_leaders(commit)
        if self._directory_group.is_leader:
            in_use = None if self._uploads is None else self._uploads.in_use
            self._directory.retain(self._config.keep_latest, in_use, self._best())
        if self._uploads is not None:
            self._uploads.committed(target, copy)

    def _commit(
        self, temporary: Path, notes: list[dict[str, Any]], files: list[WrittenFile]
    ) -> None:
        """Commit a checkpoint on rank 0, after all ranks have written and synced their files."""
        if len({note["state_sha256"] for note in notes}) > 1:
            raise CheckpointError(
                "`state` differs between ranks, but only the state of rank 0 would be saved"
            )
        trainable = sorted({name for note in notes for name in note["trainable"]})
        state = canonical_json({"state": notes[0]["state"], "trainable": trainable})
        write_synced(temporary / STATE_NAME, state)
        entry = WrittenFile(STATE_NAME, len(state), hashlib.sha256(state).hexdigest())
        facts = {"step": notes[0]["step"], "figures": notes[0]["figures"], **self._facts}
        files = [*files, entry]
        write_manifest(temporary, files, facts)
        final = self._directory.commit(temporary)
        size_bytes = sum(f.size_bytes for f in files)
        self._meter.record(checkpoint_bytes=size_bytes)
        self._logger.info("saved %s (%d bytes)", final, size_bytes)
