"""Saving and resuming: any layout to any layout, and never half a checkpoint.

A save copies all tensors to CPU memory (asynchronous) or takes them as they are, lets DCP decide
which rank writes which chunk, and commits in one rename (see `storage`). Everything
the ranks say to each other meanwhile goes over a gloo group of this module's own: a background
thread that shared the training group would interleave its collectives with the step's.

Names are layout-free: "model.FQN" for parameters and persistent buffers, "optimizer.FQN.NAME" for
optimizer state, "rng.rank-R-of-W.NAME" for random state. Optimizer hyperparameters are not saved;
they are the recipe's. Rejected: DCP's get_optimizer_state_dict, which runs an optimizer step to
invent state that a frozen or not yet stepped parameter does not have; `dcp.async_save`, which
leaves hashing and the commit to the caller anyway.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchmm.common.changes import changes
from torchmm.common.errors import CheckpointError, PeerError
from torchmm.common.files import canonical_json, write_synced
from torchmm.common.rng import capture_rng
from torchmm.parallel.health.peers import SideGroup, is_peer_trouble
from torchmm.recipe.training_section import CheckpointConfig
from torchmm.training.checkpoint.directory import CheckpointDirectory
from torchmm.training.checkpoint.manifest import (
    WrittenFile,
    find_problems,
    list_steps,
    read_json,
    read_manifest,
    refuse_newer_format,
    write_manifest,
)
from torchmm.training.checkpoint.state import (
    OptimizerState,
    Wish,
    empty_optimizer_state,
    find_misfits,
    find_mismatches,
    model_tensors,
    optimizer_tensors,
    trainable_names,
)
from torchmm.training.checkpoint.storage import SafetensorsReader, SafetensorsWriter, read_index

STATE_NAME = "state.json"
_SHOWN_PROBLEMS = 20
_LEAVE_WAIT_S = 60.0


@dataclass(frozen=True)
class Restored:
    """What a load found besides the tensors it put in place."""

    path: Path
    step: int
    state: dict[str, Any]
    """The JSON given to `save`."""
    rng: dict[str, Tensor] | None
    """This rank's random state for `restore_rng`, to be put back after the data loader's
    iterator exists (creating it draws random numbers). None if the checkpoint was saved by
    another number of ranks or in another layout, in which ranks that must draw alike were others;
    seed again, with `step` as a coordinate."""


class CheckpointManager:
    """The checkpoints of one run directory; a context manager.

    All methods but `failed` and `wait` communicate: every rank must call them in the same order.

    Args:
        run_dir: checkpoints are in `run_dir`/checkpoints/step-N.
        layout: sizes of the parallel dimensions; recorded.
        recipe_sha256: recorded; a resume under another recipe is logged.
        recipe: recorded, so that the log can name what changed.
        directory: that of `run_dir`, where rank 0 claims it earlier and releases it later.
    Raises:
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
    ) -> None:
        self._config = config
        self._logger = logger
        self._directory = directory or CheckpointDirectory(run_dir / "checkpoints", logger)
        self._releases = directory is None
        self._group = SideGroup.create()
        self._facts: dict[str, Any] = {
            "layout": layout,
            "recipe_sha256": recipe_sha256,
            "recipe": recipe or {},
            "torch": str(torch.__version__),
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
        self._group.on_rank_0(self._directory.claim)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Closes; on the way out with an error only gives a save under way time to finish, as it
        is then the one to resume from. With a lost peer it cannot."""
        if error is None:
            self.close()
        elif self._thread is not None and not isinstance(error, PeerError):
            self._thread.join(_LEAVE_WAIT_S)

    @property
    def failed(self) -> bool:
        """Whether a background save of this rank has failed; `wait` raises the reason.

        Not collective: agree on it in the step's reduction, then let all ranks call `wait`.
        """
        return self._failure is not None

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Saves step `step`; returns when the values are copied (asynchronous) or committed.

        A step that has a checkpoint already is not saved again.

        Args:
            state: JSON, the same on all ranks (data position and the like).
        Raises:
            CheckpointError: this save, or the one before it, failed; nothing committed is harmed
                and the next save may succeed.
            PeerError: a rank was lost while saving.
        """
        self.wait()
        target = self._directory.path / f"step-{step}"
        if self._group.on_rank_0(target.exists):
            self._logger.info("%s exists already, not saved again", target)
            return
        if torch.cuda.is_available():
            # States that rest on the host may still be on their way there from the update; the
            # stream that computes waits for them (`optimizers/host.py`), the host until here not.
            torch.cuda.current_stream().synchronize()
        tensors = model_tensors(model) | optimizer_tensors(model, optimizer.state)
        tensors |= {self._rng_prefix + name: value for name, value in capture_rng().items()}
        note = {
            "step": step,
            "state": state,
            "state_sha256": hashlib.sha256(canonical_json(state)).hexdigest(),
            "trainable": trainable_names(model, optimizer),
        }
        if not self._config.asynchronous:
            self._write(target, tensors, note)
            return
        staged = cast(dict[str, Tensor], self._stager.stage(tensors))
        self._thread = threading.Thread(
            target=self._write_in_background, args=(target, staged, note), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits for a save under way and raises its failure, if any, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finishes a save under way and lets other processes use the directory."""
        try:
            self.wait()
        finally:
            self._stager.close()
            if self._releases:
                self._directory.release()

    def resume(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, restarted: bool = False
    ) -> Restored | None:
        """Loads what `config.resume` says; None to start afresh.

        Checkpoints of later steps than the one resumed belong to a course of training that is
        given up now. They are renamed, not removed: otherwise the next resume would prefer them
        and retention would count them.

        Args:
            restarted: this process replaces one that died (torchrun's restart count is > 0).
                "none" or a path did their part then, if that is so of any rank, and mean "auto"
                now. Nodes count for themselves: those that others made restart may know nothing.
        Raises:
            CheckpointError: the named checkpoint, or with "auto" every one, is unusable.
        """
        choice = "auto" if any(self._group.gather(restarted)) else self._config.resume
        restored = None
        if choice == "auto":
            path = self.latest_valid()
            if path is not None:
                restored = self._load_verified(path, model, optimizer)
        elif choice != "none":
            restored = self.load(Path(choice), model, optimizer)
        step = -1 if restored is None else restored.step
        self._group.on_rank_0(lambda: self._directory.set_aside_after(step))
        return restored

    def latest_valid(self) -> Path | None:
        """The newest checkpoint whose every byte is as written; None if there is none at all.

        Raises:
            CheckpointError: a newer version wrote one, or there are some and all are damaged.
        """
        candidates = self._group.on_rank_0(lambda: list_steps(self._directory.path))
        for path in candidates:
            self._group.on_rank_0(partial(refuse_newer_format, path))
            problems = self._find_problems(path)
            if not problems:
                return path
            self._logger.error("SKIPPING DAMAGED CHECKPOINT %s: %s", path, "; ".join(problems))
        if candidates:
            raise CheckpointError(
                f"all {len(candidates)} checkpoints in {self._directory.path} are damaged; "
                'set checkpoint.resume = "none" to start afresh'
            )
        return None

    def load(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Restored:
        """Verifies `path` and loads it in place, whatever layout it was saved from.

        Args:
            optimizer: its state is replaced; None loads the model only.
        Raises:
            CheckpointError: damaged, or names, shapes or dtypes do not fit exactly. Nothing was
                loaded; all problems are listed.
        """
        problems = self._find_problems(path)
        if problems:
            raise CheckpointError(f"{path} is not usable:\n{_bullets(problems)}")
        return self._load_verified(path, model, optimizer)

    @property
    def _rng_prefix(self) -> str:
        return f"rng.rank-{self._group.rank}-of-{self._group.size}."

    def _find_problems(self, path: Path) -> list[str]:
        """Every rank hashes its share of the files."""
        mine = find_problems(path, self._group.rank, self._group.size)
        return sorted({problem for of_rank in self._group.gather(mine) for problem in of_rank})

    def _load_verified(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> Restored:
        manifest = read_manifest(path)
        index = read_index(path)
        saved = read_json(path / STATE_NAME)
        tensors = model_tensors(model)
        optimizer_state: OptimizerState = {}
        trainable: list[str] | None = None
        if optimizer is not None:
            optimizer_state = empty_optimizer_state(model, optimizer, index)
            tensors |= optimizer_tensors(model, optimizer_state)
            trainable = trainable_names(model, optimizer)
        wish = Wish(find_mismatches(index, tensors), list(tensors), trainable)
        problems = find_misfits(index, saved["trainable"], self._group.gather(wish))
        if problems:
            raise CheckpointError(
                f"{path} does not fit the model or what of it is trained:\n{_bullets(problems)}\n"
                "Restore [model] and [freeze] of the recipe, or start another run: with another "
                'name, or checkpoint.resume = "none"'
            )
        same_layout = _sizes(manifest["layout"]) == _sizes(self._facts["layout"])
        rng = {
            name: torch.empty(entry["shape"], dtype=torch.uint8)
            for name, entry in index.items()
            if name.startswith(self._rng_prefix) and same_layout
        }
        self._read(path, tensors | rng)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(optimizer_state)
        if manifest["recipe_sha256"] != self._facts["recipe_sha256"]:
            # Checkpoints of older versions hold the digest alone.
            changed = changes(manifest.get("recipe") or {}, self._facts["recipe"])
            what = (
                f": {'; '.join(changed)}" if manifest.get("recipe") else ", which it does not hold"
            )
            self._logger.warning("%s was saved under another recipe%s", path, what)
        if not rng:
            self._logger.warning(
                "%s was saved by %s ranks in layout %s, now there are %s in %s: random streams "
                "start anew",
                path,
                manifest["world_size"],
                _sizes(manifest["layout"]),
                self._group.size,
                _sizes(self._facts["layout"]),
            )
        rng = {name.removeprefix(self._rng_prefix): value for name, value in rng.items()}
        return Restored(path, manifest["step"], saved["state"], rng or None)

    def _read(self, path: Path, tensors: dict[str, Tensor]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            dcp.load(
                tensors,
                storage_reader=SafetensorsReader(path),
                planner=planner,
                process_group=self._group.group,
                no_dist=self._group.group is None,
            )
        except CheckpointException as error:
            raise _as_checkpoint_error(f"cannot load {path}", error) from error

    def _write_in_background(
        self, target: Path, tensors: dict[str, Tensor], note: dict[str, Any]
    ) -> None:
        try:
            self._write(target, tensors, note)
        except BaseException as error:  # kept for `wait`, which raises it
            self._failure = error

    def _write(self, target: Path, tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        writer = SafetensorsWriter(target, note, self._commit)
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
            writer.discard()
            raise _as_checkpoint_error(
                f"cannot save {target} (older ones are intact)", error
            ) from error
        except RuntimeError as error:
            if not is_peer_trouble(error):
                raise
            raise PeerError(f"a rank was lost while saving {target}: {error}") from error
        if self._group.rank == 0:
            self._directory.retain(self._config.keep)

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
        facts = {"step": notes[0]["step"], **self._facts}
        write_manifest(temporary, [*files, entry], facts)
        final = self._directory.commit(temporary)
        self._logger.info("saved %s (%d bytes)", final, sum(f.size_bytes for f in files))


def _sizes(layout: dict[str, int]) -> dict[str, int]:
    """The dimensions that a layout has: size 1 is none."""
    return {name: size for name, size in layout.items() if size != 1}


def _as_checkpoint_error(what: str, error: CheckpointException) -> CheckpointError:
    """One line per failed rank; DCP's own text is a page of tracebacks."""
    lines = [f"rank {rank}: {_describe(e)}" for rank, (e, _) in sorted(error.failures.items())]
    return CheckpointError(f"{what}:\n{_bullets(lines)}")


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError | CheckpointError) else repr(error)


def _bullets(lines: list[str]) -> str:
    shown = [f"  - {line}" for line in lines[:_SHOWN_PROBLEMS]]
    if len(lines) > _SHOWN_PROBLEMS:
        shown.append(f"  - and {len(lines) - _SHOWN_PROBLEMS} more")
    return "\n".join(shown)
