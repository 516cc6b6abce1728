"""torch.compile of layers: which graphs there are, why, what they took, and where they are kept.

Layers of one kind share their graphs. Packing gives every microbatch other numbers of tokens,
segments and images, so the sizes that change are told to the compiler beforehand (`mark_sizes`):
one graph does for all of them, and a second for a single image, since the compiler makes a graph of
its own for a size of one. `graphs` counts, and says which guard failed where there are more: the
host would compile for minutes in the middle of a run. Rejected: `dynamic=True`, which leaves open
how many features there are, too, and makes slower code; the compiler's own finding out, which takes
a graph for each size that it sees change.

Compiled code is kept in the user's cache directory (`keep_compiled_code`), so that a run that is
resumed does not compile again. torch unpickles and executes what it finds there. Rejected: the run
directory, which people pass on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from torchmm.common.files import make_writable_directory
from torchmm.common.log import working
from torchmm.models.layered import LayeredModule
from torchmm.parallel import torch_private

Forward = Callable[..., Any]
MOST_GRAPHS = 2
"""Of a kind of layer in a run."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Graph:
    """A graph that was compiled.

    Attributes:
        kind: of the layers it is for.
        number: among the graphs of these, from 1.
        reason: which guards of earlier graphs failed; empty for the first.
        compile_ms: what tracing and compiling took.
        from_cache: whether its code was there already.
    """

    kind: str
    number: int
    reason: str
    compile_ms: float
    from_cache: bool


@dataclass(eq=False)
class LayerKind:
    """Layers that are computed alike, up to sizes of inputs and values of weights.

    Attributes:
        name: for messages.
        backend: of torch.compile.
        run: all kinds of layers of the run, by anything.
        compilations: of its graphs, in order.
    """

    name: str
    backend: str
    run: Mapping[Any, LayerKind]
    compilations: list[torch_private.CompileEvent] = field(default_factory=list)
    _code: CodeType | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Forward:
        """What torch.compile asks a backend for."""
        self.compilations.append(torch_private.CompileEvent.current())
        with working(f"compiling {self.name}", len(self.run), "kinds of layers") as work:
            work.at(sum(bool(kind.compilations) for kind in self.run.values()))
            return torch_private.compiler_named(self.backend)(graph, inputs)

    def compiled(self, forward: Forward) -> Forward:
        """A layer's forward, compiled when it is first called."""

        def layer_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        # torch.compile looks graphs up by the code that they are made of. Layers of several kinds
        # may have one class, thus one code: each would look through the graphs of all of them.
        if self._code is None:
            self._code = layer_forward.__code__.replace(co_name=self.name)
        layer_forward.__code__ = self._code
        call = torch.compile(layer_forward, fullgraph=True, backend=self)

        def compiled_forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            # A first layer may get a view, of which a graph knows more than others' inputs satisfy.
            hidden = hidden.clone() if torch_private.is_view(hidden) else hidden
            mark_sizes((hidden, args, kwargs))
            return call(hidden, *args, **kwargs)

        return compiled_forward


class Compilation:
    """The compiled layers of a rank.

    Args:
        backend: of torch.compile.
    """

    def __init__(self, backend: str = "inductor") -> None:
        # Beyond it, a run would end, which is worse than to compile now and then.
        torch._dynamo.config.recompile_limit = 64
        self._backend = backend
        self._kinds: dict[Any, LayerKind] = {}
        self._told: dict[str, int] = {}

    def kinds(self, module: LayeredModule, way: str = "") -> list[LayerKind]:
        """The kind of each of a module's layers.

        Args:
            way: what distinguishes graphs of the same layers, where one run has several.
        """
        sizes = module.layer_sizes()
        found = []
        for index, layer in module.indexed_layers():
            key = (module.name, type(layer), sizes[index], way)
            if key not in self._kinds:
                name = ", ".join([f"layers like {index} of {module.name}", *([way] if way else [])])
                self._kinds[key] = LayerKind(name, self._backend, self._kinds)
            found.append(self._kinds[key])
        return found

    def new_graphs(self) -> list[Graph]:
        """Graphs that were compiled since the last call."""
        return [graph for kind in self._kinds.values() for graph in self._new_of(kind)]

    def _new_of(self, kind: LayerKind) -> Iterator[Graph]:
        told = self._told.get(kind.name, 0)
        for number, compilation in enumerate(kind.compilations[told:], told + 1):
            yield Graph(kind.name, number, *compilation.figures())
        self._told[kind.name] = len(kind.compilations)


def tell_graphs(graphs: Sequence[Graph], step: int, log: logging.Logger) -> None:
    """Logs what a step has compiled; warns where a kind of layer has too many graphs."""
    if not graphs:
        return
    took_s = sum(graph.compile_ms for graph in graphs) / 1e3
    kept = sum(graph.from_cache for graph in graphs)
    text = "step %d: %d graphs of layers compiled in %.1f s, %d of them from %s"
    log.info(text, step, len(graphs), took_s, kept, os.environ.get(CACHE_VARIABLE, "a cache"))
    for graph in graphs:
        if graph.number > MOST_GRAPHS:
            text = "%s have %d graphs by now, and %d should do; compiled anew because of: %s"
            log.warning(text, graph.kind, graph.number, MOST_GRAPHS, graph.reason)


def mark_sizes(value: Any) -> None:
    """Tells torch.compile which sizes of a layer's inputs change from call to call.

    All, except that the last of real numbers is features, of which there are always as many.
    """
    if isinstance(value, Tensor):
        sizes = value.ndim - value.is_floating_point() if value.ndim > 1 else value.ndim
        torch._dynamo.maybe_mark_dynamic(value, list(range(sizes)))
    elif isinstance(value, Mapping):
        mark_sizes(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            mark_sizes(part)
    elif is_dataclass(value):
        mark_sizes([getattr(value, part.name) for part in fields(value)])


def keep_compiled_code() -> None:
    """Let torch keep compiled code in a private directory, unless the user has chosen another.

    The directory is `torchmm/compile` in XDG_CACHE_HOME, or in `~/.cache`. If it cannot be written,
    torch uses its own default, a directory of this user in the temporary directory.
    """
    # torch itself sets the variable, when it first looks for its own directory.
    if os.environ.get(CACHE_VARIABLE) not in (None, torch_private.usual_code_cache()):
        return
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        directory = Path(cache).expanduser().absolute() / "torchmm" / "compile"
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        make_writable_directory(directory)
    except (OSError, RuntimeError) as error:  # no home directory, or a read-only one
        logger.debug("compiled code is kept in %s: %s", torch_private.usual_code_cache(), error)
        return
    os.environ[CACHE_VARIABLE] = str(directory)
