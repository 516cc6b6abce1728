"""Errors that users can fix, with their exit codes.

Each error message has the source (file, key, sample or rank), the wrong value, and how to fix it.
`train.py` maps error classes to exit codes. The exit code of torchrun is always 1 if a worker
fails, so `STATUS.json` in the run directory contains the exit code.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path

import jinja2

EXIT_DONE = 0
MAX_LISTED = 20
"""Maximum number of problems in an error message. It also has the total number."""
MAX_LISTED_PROBLEMS = 100
"""Maximum number of problems of a recipe in an error message."""

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


def list_problems(head: str, problems: Sequence[str], listed: int = MAX_LISTED) -> str:
    """Return a heading and the first problems, one per line."""
    lines = [head, *(f"  - {problem}" for problem in problems[:listed])]
    if len(problems) > listed:
        lines.append(f"  ... and {len(problems) - listed} more")
    return "\n".join(lines)


def count_problems(problems: Sequence[str]) -> str:
    """Return "1 problem", or the number of problems."""
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems"


class TorchmmError(Exception):
    """Base class of errors that stop a run with a message instead of a traceback."""

    exit_code = 1
    reported = False
    """Whether a different rank has reported the error, so that this rank does not."""


class ConfigError(TorchmmError):
    """The recipe, an override or the command line is invalid. Nothing was started.

    Args:
        problems: All problems. The message lists the first `MAX_LISTED_PROBLEMS`, one per line.
    """

    exit_code = 2

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            head = f"{len(self.problems)} problems in the recipe:"
            super().__init__(list_problems(head, self.problems, MAX_LISTED_PROBLEMS))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)  # pickling preserves all problems


class PlanError(TorchmmError):
    """A pipeline plan cannot be executed or does not fit into memory. Nothing was started.

    Args:
        problems: All problems. The message lists the first ones, sorted by severity.
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
    """Checkpoint or weights are missing, corrupt, do not match the model, or cannot be saved."""

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


class PreemptedError(TorchmmError):
    """The run received a stop signal, saved a checkpoint and exited."""

    exit_code = 75


def install_command(extra: str) -> str:
    """Return the command that installs an extra of torchmm, for a clone or an installed wheel.

    torchmm is not in a package index, so `pip install "torchmm[extra]"` fails for a wheel. The
    command lists the packages of the extra instead.
    """
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]'"
    try:
        lines = importlib.metadata.requires("torchmm") or []
    except importlib.metadata.PackageNotFoundError:  # the package was copied, not installed
        lines = []
    fields_of_lines = [line.replace("'", '"').partition(";") for line in lines]
    requirements = [
        requirement.strip()
        for requirement, _, marker in fields_of_lines
        if f'extra == "{extra}"' in marker
    ]
    if not requirements:
        return f"install the packages of torchmm's extra {extra!r}"
    return f"pip install {shlex.join(requirements)}"


def describe_load_error(error: Exception) -> str:
    """Return the reason why Hugging Face cannot load a model or tokenizer, in one line.

    Models and tokenizers can contain custom code. Hugging Face recommends to trust it, which
    torchmm does not support.
    """
    if "trust_remote_code" in str(error):
        return (
            "it requires custom code from its repository, which torchmm does not run; use a "
            "model or tokenizer whose classes are part of transformers, or save it in that "
            "form"
        )
    return " ".join(str(error).split())


def describe_error(error: BaseException) -> str:
    """Return class, message and source line of an exception in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {reason}, in {Path(last.filename).name}, line {last.lineno}"
