"""Errors a user can act on, and the exit code each of them ends a run with.

Every error names what was read (file, key, sample, rank), the offending value and a remedy.
`train.py` maps these classes to exit codes; under torchrun, whose own exit code is always 1
when a worker fails, `STATUS.json` in the run directory holds the code instead.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path

import jinja2

EXIT_DONE = 0
LISTED = 20
"""Problems that a message names; of more, it says how many."""
MOST_LISTED = 100
"""The same for mistakes in a recipe, of which people want to see all."""

LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that classes of Hugging Face raise for settings they cannot use."""
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""Exceptions that chat templates raise for messages of an unsupported form."""


def list_problems(head: str, problems: Sequence[str], listed: int = LISTED) -> str:
    """The first problems, a line each, after a line that says what they are about."""
    lines = [head, *(f"  - {problem}" for problem in problems[:listed])]
    if len(problems) > listed:
        lines.append(f"  ... and {len(problems) - listed} more")
    return "\n".join(lines)


def count_problems(problems: Sequence[str]) -> str:
    """ "1 problem", or how many."""
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems"


class TorchmmError(Exception):
    """Base of all errors that end a run with a message instead of a traceback."""

    exit_code = 1
    reported = False
    """Another rank has already reported the same, so this one need not."""


class ConfigError(TorchmmError):
    """The recipe, an override or the command line is invalid. Nothing was started.

    Args:
        problems: All problems. The message lists the first `MOST_LISTED`, one per line.
    """

    exit_code = 2

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            head = f"{len(self.problems)} problems in the recipe:"
            super().__init__(list_problems(head, self.problems, MOST_LISTED))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)  # from another process it comes with all of them


class PlanError(TorchmmError):
    """A pipeline plan cannot be executed or does not fit into memory. Nothing was started.

    Args:
        problems: every problem found; the message lists the first ones, the most serious first.
    """

    exit_code = 2

    def __init__(self, problems: list[str]) -> None:
        self.problems = list(problems)
        head = f"{count_problems(problems)} in the pipeline plan:"
        super().__init__(list_problems(head, problems))


class DataError(TorchmmError):
    """A data source cannot be read, or too many samples are corrupt."""

    exit_code = 3


class CheckpointError(TorchmmError):
    """A checkpoint or weight file is missing, incomplete, changed or does not match the model, or a
    checkpoint cannot be saved."""

    exit_code = 4


class NonFiniteError(TorchmmError):
    """The loss or a gradient is NaN or infinite. No rank updated its parameters."""

    exit_code = 5


class PeerError(TorchmmError):
    """Another rank failed or did not respond in time."""

    exit_code = 6


class UploadError(TorchmmError):
    """The export is complete, but the upload to the Hugging Face Hub failed."""

    exit_code = 7


class Preempted(TorchmmError):  # noqa: N818 - an outcome, not a failure
    """The run received a stop signal, saved a checkpoint and exited."""

    exit_code = 75


def install_command(extra: str) -> str:
    """Return the command that installs an extra of torchmm, for a clone or an installed wheel.

    No index has torchmm, so `pip install "torchmm[extra]"` fails for a wheel. The command names the
    packages of the extra instead.
    """
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]'"
    try:
        lines = importlib.metadata.requires("torchmm") or []
    except importlib.metadata.PackageNotFoundError:  # the package was copied, not installed
        lines = []
    parts = [line.replace("'", '"').partition(";") for line in lines]
    found = [need.strip() for need, _, marker in parts if f'extra == "{extra}"' in marker]
    if not found:
        return f"install the packages of torchmm's extra {extra!r}"
    return f"pip install {shlex.join(found)}"


def describe_refusal(error: Exception) -> str:
    """Why Hugging Face could not load something, in one line.

    Models and tokenizers may bring their own code. Hugging Face's remedy is to trust it, which
    torchmm never does.
    """
    if "trust_remote_code" in str(error):
        return (
            "it consists of its own code, which is never run here; name a model or tokenizer "
            "whose classes are part of transformers, or save it as one"
        )
    return " ".join(str(error).split())


def describe_error(error: BaseException) -> str:
    """Return class, message and source line of an exception in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {reason}, in {Path(last.filename).name}, line {last.lineno}"
