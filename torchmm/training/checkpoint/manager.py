"""Saving and resuming: any layout to any layout, and never half a checkpoint.

A save copies all tensors to CPU memory (asynchronous) or takes them as they are, lets DCP decide
which rank writes which chunk, and commits in one rename (see `storage`). Everything
the ranks say to each other meanwhile goes over a gloo group of this module's own: a background
thread that shared the training group would interleave its collectives with the step's. Where
`checkpoint.upload` says so, committed checkpoints are copied to a store (`copies`), and a start
finds them there, on machines that share nothing with those that saved them.

Names are layout-free: "model.FQN" for parameters and persistent buffers, "optimizer.FQN.NAME" for
optimizer state, "ema.FQN" for averages of parameters, "rng.rank-R-of-W.NAME" for random state.
Optimizer hyperparameters are not saved; they are the recipe's. Rejected: DCP's
get_optimizer_state_dict, which runs an optimizer step to invent state that a frozen or not yet
stepped parameter does not have; `dcp.async_save`, which leaves hashing and the commit to the caller
anyway.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
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
from torchmm.common.log import working
from torchmm.common.rng import capture_rng
from torchmm.parallel.health.peers import SideGroup, is_peer_trouble
from torchmm.recipe.data_section import DataConfig, local_path
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.copies import (
    CheckpointStore,
    Uploads,
    folder_of,
    is_in_store,
    open_store,
    step_of_folder,
)
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.figures import SaveMeter
from torchmm.training.checkpoint.load import (
    STATE_NAME,
    Restored,
    as_checkpoint_error,
    bullets,
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
    refuse_newer_format,
    step_of,
    write_manifest,
)
from torchmm.training.checkpoint.site import Site
from torchmm.training.checkpoint.state import (
    average_tensors,
    model_tensors,
    optimizer_tensors,
    trainable_names,
)
from torchmm.training.checkpoint.storage import SafetensorsWriter
from torchmm.training.optimizers.average import WeightAverage

_LEAVE_WAIT_S = 60.0


class CheckpointManager:
    """The checkpoints of one run directory; a context manager.

    All methods but `failed` and `wait` communicate: every rank must call them in the same order.

    Args:
        run_dir: checkpoints are in `run_dir`/checkpoints/step-N.
        layout: sizes of the parallel dimensions; recorded.
        recipe_sha256: recorded; a resume under another recipe is logged.
        recipe: recorded, so that the log can name what changed.
        directory: that of `run_dir`, where rank 0 claims it earlier and releases it later.
        data: Section with the settings of stores. Default: the defaults of the section.

    Raises:
        ConfigError: `config.upload` or `config.staging` cannot be used.
        InUseError: another live process writes to the same run directory.
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
        self._claimed = [run] if directory is None else []
        self._group.on_rank_0(run.claim)
        self._directory = run
        self._site = Site.of_all(self._group)
        self._uploads: Uploads | None = None
        if config.upload is not None:
            self._find_places(config.upload, run, run_dir.name)

    def _find_places(self, upload: str, run: CheckpointDirectory, name: str) -> None:
        """Where checkpoints are written, which need not be one place for all ranks, and where they
        are copied to."""
        path = run.path if self._config.staging is None else local_path(self._config.staging) / name
        self._site = Site.find(self._group, path)
        partial = self._site.size < self._group.size
        if partial or path != run.path:
            self._directory = CheckpointDirectory(path, self._logger, partial)
            self._claimed.append(self._directory)
            self._site.on_leaders(self._directory.claim)
        self._remote = open_store(f"{upload}/{name}", self._data, self._logger)
        self._uploads = self._remote.start_uploads(self._config.keep, self._best, self._meter)

    def _best(self) -> list[int]:
        """Steps that are kept however old."""
        return self._directory.best(self._config.keep_best)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Closes; on the way out with an error only gives a save under way time to finish, as it
        is then the one to resume from. With a lost peer it cannot."""
        if error is None:
            self.close()
        elif not isinstance(error, PeerError):
            if self._thread is not None:
                self._thread.join(_LEAVE_WAIT_S)
            if self._uploads is not None:
                self._uploads.wait(_LEAVE_WAIT_S)

    @property
    def failed(self) -> bool:
        """Whether a background save of this rank has failed; `wait` raises the reason.

        Not collective: agree on it in the step's reduction, then let all ranks call `wait`.
        """
        return self._failure is not None

    @property
    def complaint(self) -> str:
        """Which checkpoint is not in the store though it should be, and why; empty: none."""
        return "" if self._uploads is None else self._uploads.complaint

    def take_figures(self) -> dict[str, Any]:
        """Return metrics of the saves and copies that finished since the last call."""
        return self._meter.take()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        figures: Mapping[str, float | None] = MappingProxyType({}),
        average: WeightAverage | None = None,
    ) -> None:
        """Saves step `step`; returns when the values are copied (asynchronous) or committed.

        A step that has a checkpoint already is not saved again.

        Args:
            state: JSON, the same on all ranks (data position and the like).
            figures: of metrics.jsonl, by which the best checkpoints are found.
            average: of the weights.

        Raises:
            CheckpointError: this save, or the one before it, failed; nothing committed is harmed
                and the next save may succeed.
            PeerError: a rank was lost while saving.
        """
        began_s = time.perf_counter()
        self.wait()
        target = self._directory.path / f"step-{step}"
        exists = self._group.rank == 0 and target.is_dir()
        copying = self._uploads is not None and self._uploads.in_use is not None
        known = self._group.gather((exists, copying))
        if known[0][0]:
            self._logger.info("%s exists already, not saved again", target)
            return
        if torch.cuda.is_available():
            # States that rest on the host may still be on their way there from the update; the
            # stream that computes waits for them (`optimizers/host.py`), the host until here not.
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
        if self._config.asynchronous:
            staged = cast(dict[str, Tensor], self._stager.stage(tensors))
            self._thread = threading.Thread(
                target=self._write_in_background, args=(write, staged), daemon=True
            )
            self._thread.start()
        else:
            write(tensors)
        self._meter.note(save_wait_ms=(time.perf_counter() - began_s) * 1e3)

    def wait(self) -> None:
        """Waits for a save under way and raises its failure, if any, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finishes a save and a copy under way, copies the newest checkpoint, and lets other
        processes use the directory."""
        try:
            self.wait()
            if self._uploads is not None:
                self._uploads.finish()
        finally:
            self._stager.close()
            for directory in self._claimed:
                directory.release()

    @working("verifying and loading the newest checkpoint")
    def resume(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        restarted: bool = False,
        average: WeightAverage | None = None,
    ) -> Restored | None:
        """Loads what `config.resume` says; None to start afresh.

        Checkpoints of later steps than the one resumed belong to a course of training that is
        given up now. They are renamed, not removed: otherwise the next resume would prefer them
        and retention would count them.

        Args:
            restarted: this process replaces one that died (torchrun's restart count is > 0).
                "none" or a path did their part then, if that is so of any rank, and mean "auto"
                now. Nodes count for themselves: those that others made restart may know nothing.
            average: of the weights; is replaced, or begins anew if the checkpoint has none.

        Raises:
            CheckpointError: the named checkpoint, or with "auto" every one, is unusable.
        """
        choice = "auto" if any(self._group.gather(restarted)) else self._config.resume
        restored = None
        if choice == "auto":
            path = self.latest_valid()
            if path is not None:
                restored = self._load_verified(path, model, optimizer, average)
        elif choice != "none" and is_in_store(choice):
            restored = self._load_verified(self._fetch_named(choice), model, optimizer, average)
        elif choice != "none":
            restored = self.load(local_path(choice), model, optimizer, average)
        step = -1 if restored is None else restored.step
        self._site.on_leaders(lambda: self._directory.set_aside_after(step))
        if self._uploads is not None:
            self._set_aside_copies(restored)
            if restored is not None and restored.path.parent == self._directory.path:
                self._uploads.resumed(restored.path)
        return restored

    def latest_valid(self) -> Path | None:
        """The newest checkpoint whose every byte is as written; None if there is none at all.

        Where checkpoints are copied to a store, those there count too, and come here if they are
        newer than what is here, or the same and that is damaged.

        Raises:
            CheckpointError: a newer version wrote one, there are some and all are damaged, or the
                store does not answer.
        """
        candidates = self._group.on_rank_0(self._candidates)
        for candidate in candidates:
            if isinstance(candidate, Path):
                path = candidate
                self._group.on_rank_0(partial(refuse_newer_format, path))
                problems = self._find_problems(path)
            else:
                self._logger.info("fetching %s/%s", self._remote.address, candidate)
                path, problems = self._fetch(self._remote, candidate)
            if not problems:
                return path
            self._logger.error("SKIPPING DAMAGED CHECKPOINT %s: %s", candidate, "; ".join(problems))
        if candidates:
            raise CheckpointError(
                f"all {len(candidates)} checkpoints in {self._directory.path} are damaged; "
                'set checkpoint.resume = "none" to start afresh'
            )
        return None

    def _candidates(self) -> list[Path | str]:
        """Checkpoints here and folders in the store, newest first; of the same step, here first."""
        here: list[Path | str] = [*list_steps(self._directory.path)]
        there = [] if self._uploads is None else self._remote.committed()
        return sorted([*here, *there], key=_step_and_nearness, reverse=True)

    def _fetch(self, store: CheckpointStore, folder: str) -> tuple[Path, list[str]]:
        return store.fetch_checkpoint(folder, self._directory, self._site, self._group)

    def _fetch_named(self, address: str) -> Path:
        """The checkpoint of `resume`, brought here."""
        where, _, folder = address.rstrip("/").rpartition("/")
        step_of_folder(folder)
        path, problems = self._fetch(open_store(where, self._data, self._logger), folder)
        if problems:
            raise CheckpointError(f"{address} is not usable:\n{bullets(problems)}")
        return path

    def _set_aside_copies(self, restored: Restored | None) -> None:
        """What training does not go on from must not be what the next start finds."""
        step, own = -1, None
        if restored is not None:
            step = restored.step
            own = self._group.on_rank_0(lambda: folder_of(read_manifest(restored.path)))
        self._group.on_rank_0(lambda: self._remote.set_aside_after(step, own))

    def load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        average: WeightAverage | None = None,
    ) -> Restored:
        """Verifies `path` and loads it in place, whatever layout it was saved from.

        Args:
            optimizer: its state is replaced; None loads the model only.
            average: as with `resume`.

        Raises:
            CheckpointError: damaged, or names, shapes or dtypes do not fit exactly. Nothing was
                loaded; all problems are listed.
        """
        problems = self._find_problems(path)
        if problems:
            raise CheckpointError(f"{path} is not usable:\n{bullets(problems)}")
        return self._load_verified(path, model, optimizer, average)

    def _find_problems(self, path: Path) -> list[str]:
        """Every rank hashes its share of the files that its site has to have."""
        mine = find_problems(path, self._site.rank, self._site.size)
        return sorted({problem for of_rank in self._group.gather(mine) for problem in of_rank})

    def _load_verified(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        average: WeightAverage | None,
    ) -> Restored:
        return load_verified(
            path, model, optimizer, self._group, self._facts, self._logger, average
        )

    def _write_in_background(
        self, write: Callable[[dict[str, Tensor]], None], tensors: dict[str, Tensor]
    ) -> None:
        try:
            write(tensors)
        except BaseException as error:  # kept for `wait`, which raises it
            self._failure = error

    def _write(
        self,
        target: Path,
        tensors: dict[str, Tensor],
        note: dict[str, Any],
        began_s: float,
        copy: bool,
    ) -> None:
        """Writes and commits; `copy`: and starts to copy it to the store."""
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
            if self._site.is_leader:
                writer.discard()
            raise as_checkpoint_error(
                f"cannot save {target} (older ones are intact)", error
            ) from error
        except RuntimeError as error:
            if not is_peer_trouble(error):
                raise
            raise PeerError(f"a rank was lost while saving {target}: {error}") from error
        self._meter.note(save_ms=(time.perf_counter() - began_s) * 1e3)
        if self._site.size < self._group.size:
            self._commit_on_other_nodes(writer.temporary)
        if self._site.is_leader:
            in_use = None if self._uploads is None else self._uploads.in_use
            self._directory.retain(self._config.keep, in_use, self._best())
        if self._uploads is not None:
            self._uploads.committed(target, copy)

    def _commit_on_other_nodes(self, temporary: Path | None) -> None:
        """Each node names what its ranks have written as rank 0 has done, with the same manifest;
        collective."""
        assert temporary is not None
        target = temporary.with_name(temporary.name.partition(".tmp-")[0])
        manifest = self._group.on_rank_0((target / MANIFEST_NAME).read_bytes)

        def commit() -> None:
            if self._group.rank > 0:
                write_synced(temporary / MANIFEST_NAME, manifest)
                sync_directory(temporary)
                self._directory.replace(temporary)

        self._site.on_leaders(commit)

    def _commit(
        self, temporary: Path, notes: list[dict[str, Any]], files: list[WrittenFile]
    ) -> None:
        """Rank 0, after all ranks have written and synced their files."""
        if len({note["state_sha256"] for note in notes}) > 1:
            raise CheckpointError("`state` differs between ranks; only rank 0's would be kept")
        trainable = sorted({name for note in notes for name in note["trainable"]})
        state = canonical_json({"state": notes[0]["state"], "trainable": trainable})
        write_synced(temporary / STATE_NAME, state)
        entry = WrittenFile(STATE_NAME, len(state), hashlib.sha256(state).hexdigest())
        facts = {"step": notes[0]["step"], "figures": notes[0]["figures"], **self._facts}
        files = [*files, entry]
        write_manifest(temporary, files, facts)
        final = self._directory.commit(temporary)
        size_bytes = sum(f.size_bytes for f in files)
        self._meter.note(save_bytes=size_bytes)
        self._logger.info("saved %s (%d bytes)", final, size_bytes)


def _step_and_nearness(candidate: Path | str) -> tuple[int, bool]:
    if isinstance(candidate, Path):
        return step_of(candidate) or 0, True
    return step_of_folder(candidate), False
