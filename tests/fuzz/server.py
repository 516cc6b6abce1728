"""Process of the judge, see `fuzz.judge`."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import tomli_w
import torch
from ports import free_port

from fuzz.compare import Bounds, bounds_of, differences
from fuzz.data import make_data
from fuzz.draw import STEPS, Draw, Layout
from fuzz.models import is_sharp
from fuzz.orders import write_csv
from fuzz.ranks import run_rank, run_reference
from fuzz.recipes import complete
from fuzz.reference import write_generator
from fuzz.wording import names_a_key
from torchmm.balance.search.recipe_completion import complete_reordering, complete_sizes
from torchmm.common.errors import ConfigError, PlanError
from torchmm.extensions.low_precision.section import Float8Config
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.first_step import plan_passes, training_samples
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.planning.run_length import resolve_epochs
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.model_build import build_meta_model, choose_model_stages

Table = dict[str, Any]
LIMIT = "raise activation_checkpoint.memory_limit"
"""Error message of a plan that exceeds the memory limit.

It is the only error that may occur after the start, when the images of a step are known
(docs/concepts/layer_tuning.md).
"""


class FailedError(Exception):
    """Failure of a run, with its kind and messages."""

    def __init__(self, how: str, problems: list[str]) -> None:
        super().__init__(how)
        self.how, self.problems = how, problems


class BeyondMemoryError(Exception):
    """Messages of ranks whose plan exceeds `memory_limit`."""


class Server:
    """Judges draws sequentially.

    Args:
        directory: Directory for data and runs.
    """

    def __init__(
        self, directory: Path, deadline_s: float, defect: str = "", only_read: bool = False
    ) -> None:
        self._defect = defect
        self._only_read = only_read
        self._data = directory / "data"
        self._runs = directory / "runs"
        self._deadline_s = deadline_s
        self._number = 0
        make_data(self._data)

    def judge(self, draw: Draw) -> Table:
        """Return the fields of a `Verdict`."""
        begin = time.perf_counter()
        self._number += 1
        directory = self._runs / str(self._number)
        directory.mkdir(parents=True)
        try:
            verdict = self._judge(draw, directory)
        except FailedError as failure:
            verdict = {"kind": "failed", "how": failure.how, "problems": failure.problems}
        except BeyondMemoryError as error:
            verdict = rejected(list(error.args[0]))
        shutil.rmtree(directory, ignore_errors=True)
        return verdict | {"seconds": time.perf_counter() - begin}

    def _judge(self, draw: Draw, directory: Path) -> Table:
        read = self._read(draw, draw.first, directory, STEPS)
        if isinstance(read, list):
            return rejected(read)
        if self._only_read:
            return {"kind": "read", "how": ""}
        run, model, tokenizer, _ = read
        recipe = run.recipe
        expected = directory / "reference.pt"
        steps = STEPS + bool(draw.then)
        helper = fork(run_reference, recipe, model, tokenizer, steps, expected)
        try:
            ranks = self._launch(draw.first, read, directory)
        finally:
            helper.join(self._deadline_s)
            helper.kill()
        if not expected.exists():
            raise FailedError("no reference", [f"the reference exited with {helper.exitcode}"])
        expected_steps = torch.load(expected, weights_only=True)
        rounds = Float8Config.from_parent(recipe).scaling != "none"
        dtype = "bfloat16" if rounds else recipe.training.dtype
        noisy = recipe.optimizer.name == "muon" and dtype == "bfloat16"
        bounds = bounds_of(dtype, is_sharp(draw.sections["model"]), low_precision(recipe), noisy)
        if problems := list(differences(ranks, expected_steps, 0, bounds)):
            raise FailedError("different", problems)
        return {
            "kind": "equal",
            "how": "",
            "then": self._resume(draw, directory, expected_steps, bounds),
        }

    def _resume(self, draw: Draw, directory: Path, expected_steps: Table, bounds: Bounds) -> str:
        """Train one step from the checkpoint in the first other layout that is supported."""
        for layout in draw.then:
            read = self._read(draw, layout, directory, STEPS + 1)
            if isinstance(read, list):
                continue
            try:
                ranks = self._launch(layout, read, directory)
                if problems := list(differences(ranks, expected_steps, STEPS, bounds)):
                    raise FailedError("different", problems)
            except BeyondMemoryError:
                continue
            except FailedError as failure:
                how = f"{failure.how} after resuming"
                raise FailedError(how, [f"then {layout}", *failure.problems]) from failure
            return "equal"
        return "rejected" if draw.then else ""

    def _read(self, draw: Draw, layout: Layout, directory: Path, steps: int) -> Any:
        """Return the start state of a rank, or the errors of the recipe, like train.py."""
        table = complete(draw.table(layout), draw.source, self._data, directory, steps)
        if (generator := table["model"].get("generator")) is not None:
            generator["source"] = str(directory / "generator")
            if not Path(generator["source"]).exists():
                hidden = table["model"]["llm"]["config"]["hidden_size"]
                write_generator(generator["config"], hidden, Path(generator["source"]))
        counts_epochs = table["training"].pop("epochs", None) is not None
        uses_csv = table["parallel"].get("schedule") == "csv"
        if uses_csv:
            table["parallel"]["schedule"] = "separated"
        file = directory / "recipe.toml"
        file.write_text(tomli_w.dumps(table))
        os.environ.update(WORLD_SIZE=str(layout.world), RANK="0")
        try:
            recipe = load_recipe(file, [], layout.world).recipe
            run = resolve_recipe(complete_sizes(recipe, layout.world), layout.world)
            model, tokenizer = build_meta_model(run)
            run = complete_reordering(run, model)
            if uses_csv:
                write_csv(run, model, directory / "order.csv")
                table["parallel"]["schedule"] = f"csv:{directory / 'order.csv'}"
                file.write_text(tomli_w.dumps(table))
                run = resolve_recipe(load_recipe(file, [], layout.world).recipe, layout.world)
            if counts_epochs:
                run = run.with_recipe(_with_epochs(run.recipe, model, tokenizer))
            return (
                run,
                model,
                tokenizer,
                choose_model_stages(run, model, tokenizer, torch.device("cpu")),
            )
        except ConfigError as error:
            return list(error.problems)
        except Exception as error:
            text = traceback.format_exc()
            raise FailedError("crash before ranks", [repr(error), text]) from error

    def _launch(self, layout: Layout, read: tuple, directory: Path) -> list[Table]:
        """Run all ranks and return their saved results."""
        files = [directory / f"rank-{rank}.pt" for rank in range(layout.world)]
        for file in files:
            file.unlink(missing_ok=True)
        port, readers, processes = free_port(), {}, []
        for rank, file in enumerate(files):
            reader, writer = get_context("fork").Pipe(duplex=False)
            readers[reader] = rank
            address = rank, layout.world, port, file.with_suffix(".log")
            processes.append(fork(rank_main, address, writer, (*read, file, self._defect)))
            writer.close()
        messages = listen(readers, time.monotonic() + self._deadline_s)
        failed = (
            any(outcome != "done" for outcome, _ in messages.values())
            or len(messages) < layout.world
        )
        for process in processes:
            process.join(2.0 if failed else 30.0)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        failures = {outcome for outcome, _ in messages.values()} - {"done"}
        texts = [
            f"rank {r}: {text}"
            for r, (outcome, text) in sorted(messages.items())
            if outcome != "done"
        ]
        if "beyond memory" in failures:  # other ranks fail because of it, or with the same error
            raise BeyondMemoryError(texts)
        if "late rejection" in failures:
            raise FailedError("late rejection", texts)
        if failures or len(messages) < layout.world:
            silent = [r for r in range(layout.world) if r not in messages]
            outcome = "crash" if failures or not hung else "hang"
            raise FailedError(
                outcome, [*texts, *([f"ranks {silent} sent no message"] if silent else [])]
            )
        if hung:
            raise FailedError("hang", [f"ranks {hung} did not exit"])
        return [torch.load(file, weights_only=True) for file in files]


def rejected(problems: list[str]) -> Table:
    """Return the verdict of a rejected recipe. Error messages must name a key."""
    nameless = [p for p in problems if not names_a_key(p)]
    if nameless:
        return {"kind": "failed", "how": "error without key", "problems": nameless}
    return {"kind": "rejected", "how": "", "problems": problems}


def listen(readers: dict[Connection, int], deadline: float) -> dict[int, tuple[str, str]]:
    """Return the messages of ranks until all have sent one or the deadline is reached.

    After a failure, the other ranks have 3 s.
    """
    messages: dict[int, tuple[str, str]] = {}
    waiting = dict(readers)
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for reader in ready:
            rank = waiting.pop(reader)
            with suppress(EOFError):
                messages[rank] = reader.recv()
            if messages.get(rank, ("", ""))[0] != "done":
                deadline = min(deadline, time.monotonic() + 3.0)
    return messages


def fork(function: Callable[..., Any], *args: Any) -> Any:
    """Start a child process and return it."""
    process = get_context("fork").Process(target=function, args=args)
    process.start()
    return process


def rank_main(address: tuple[int, int, int, Path], writer: Connection, args: tuple) -> None:
    """Run a rank and send "done", "late rejection", "beyond memory" or "crash"."""
    rank, world, port, log = address
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    try:
        run_rank(*args)
        writer.send(("done", ""))
    except ConfigError as error:
        writer.send(("late rejection", str(error)))
    except PlanError as error:
        outcome = "beyond memory" if LIMIT in str(error) else "crash"
        writer.send((outcome, traceback.format_exc() if outcome == "crash" else str(error)))
    except BaseException:
        writer.send(("crash", traceback.format_exc()))
    finally:
        writer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _with_epochs(recipe: Recipe, model: MultimodalModel, tokenizer: Any) -> Recipe:
    """Return the recipe after counting the steps of as many epochs as its steps make.

    Raises:
        FailedError: The count differs from the steps.
    """
    samples = training_samples(recipe, model, tokenizer)
    assert samples is not None
    steps, passes = plan_passes(samples, recipe, math.inf, recipe.training.steps)
    training = recipe.training.model_copy(update={"steps": 1, "epochs": passes})
    recipe = recipe.model_copy(update={"training": training})
    counted = resolve_epochs(recipe, model, tokenizer)
    if counted.training.steps != steps:
        difference = f"{passes} epochs are {counted.training.steps} steps, not {steps}"
        raise FailedError("steps of epochs", [difference])
    return counted


def low_precision(recipe: Recipe) -> bool:
    """Return True if parameters, states or updates have low precision (see `bounds_of`)."""
    optimizer, training = recipe.optimizer, recipe.training
    small = "bfloat16" if training.parameter_dtype == "bfloat16" else optimizer.state_dtype
    return small != "float32" or optimizer.name == "muon"


def serve(jobs: Connection, deadline_s: float, defect: str, only_read: bool) -> None:
    """Send the verdicts of draws until None arrives or the connection is closed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fuzz") as directory, suppress(EOFError):
        server = Server(Path(directory), deadline_s, defect, only_read)
        while (table := jobs.recv()) is not None:
            jobs.send(server.judge(Draw.from_table(table)))
