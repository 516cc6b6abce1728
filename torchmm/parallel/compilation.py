"""torch.compile of layers: graphs, the reasons for recompilation, and the cache of compiled code.

Layers of one kind share their graphs. Microbatches differ in their number of segments, images and
patches, so `mark_dynamic_sizes` marks these sizes as dynamic before the first call. One graph is
then sufficient, plus a second graph for single images, because torch.compile specializes on size 1.
Training pads every packed sequence, so the number of tokens in the layers of an LLM is constant and
stays static. `Compilation.new_graphs` counts the graphs. If there are more, it reports the guard
that failed, because the host would otherwise compile for minutes during training. `dynamic=True`
would also make the number of features dynamic, with slower code. Automatic dynamic shapes need an
additional graph for each size that changes.

Compiled code is stored in the cache directory of the user (`set_compile_cache`), so that a resumed
run does not compile again. The run directory is not suitable: torch unpickles and executes the
files, and users share run directories.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from torchmm.common.files import make_writable_directory
from torchmm.common.log import report_progress
from torchmm.common.processes import find_missing_compiler
from torchmm.models.layered import LayeredModule
from torchmm.models.layers.attention import Segments
from torchmm.parallel import torch_compat
from torchmm.recipe.training_section import CompileConfig

Forward = Callable[..., Any]
MAX_GRAPHS = 2
"""Expected maximum number of graphs per layer kind in a run."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled graph.

    Attributes:
        kind: Layer kind of the graph.
        number: Index among the graphs of this kind, from 1.
        reason: Guards of earlier graphs that failed. Empty for the first graph.
        compile_ms: Time of tracing and compilation.
        from_cache: Whether the code was loaded from the cache.
    """

    kind: str
    number: int
    reason: str
    compile_ms: float
    from_cache: bool


@dataclass(eq=False)
class LayerKind:
    """Layers that share their graphs. Only input sizes and weight values differ.

    Attributes:
        name: Name in messages.
        backend: Backend of torch.compile.
        run: All kinds of layers of the run, by an arbitrary key.
        has_constant_tokens: Whether all calls have the same number of tokens.
        falls_back: Whether layers run without torch.compile if it fails.
        compilations: Compilations of its graphs, in order.
        failure: Error of torch.compile after which the layers run without it, or "".
    """

    name: str
    backend: str
    run: Mapping[Any, LayerKind]
    has_constant_tokens: bool = False
    falls_back: bool = False
    compilations: list[torch_compat.CompileEvent] = field(default_factory=list)
    failure: str = ""
    _code: CodeType | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Forward:
        """Compile a graph. torch.compile calls this object as its backend."""
        self.compilations.append(torch_compat.CompileEvent.current())
        with report_progress(f"compiling {self.name}", len(self.run), "types of layers") as work:
            work.set_completed(sum(bool(kind.compilations) for kind in self.run.values()))
            return torch_compat.find_compiler(self.backend)(graph, inputs)

    def compiled(self, forward: Forward, eager: Forward) -> Forward:
        """Return the forward of a layer, which is compiled in the first call.

        Args:
            forward: Function to compile.
            eager: Function to run instead if torch.compile fails and `falls_back` is set.
        """

        def layer_forward(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        # torch.compile looks up graphs by code object. Layers of several kinds can have the same
        # class and code, and would search through the graphs of all kinds.
        if self._code is None:
            self._code = layer_forward.__code__.replace(co_name=self.name)
        layer_forward.__code__ = self._code
        call = torch.compile(layer_forward, fullgraph=True, backend=self)

        def compiled_forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.failure:
                return eager(hidden, *args, **kwargs)
            # The first layer may receive a view. Its graph would have guards on the base, which
            # the inputs of other layers do not satisfy.
            hidden = hidden.clone() if torch_compat.is_view(hidden) else hidden
            mark_dynamic_sizes((hidden, args, kwargs), has_constant_tokens=self.has_constant_tokens)
            try:
                return call(hidden, *args, **kwargs)
            except torch_compat.COMPILE_ERRORS as error:
                if not self.falls_back:
                    raise
                self.failure = str(error) or type(error).__name__
                text = (
                    "%s run without torch.compile, because compilation failed: %s. The run "
                    "continues. Set compile.enabled = false to skip the attempt"
                )
                logger.warning(text, self.name, self.failure.strip())
            return eager(hidden, *args, **kwargs)

        return compiled_forward


class Compilation:
    """Compiled layers of a rank.

    Args:
        backend: Backend of torch.compile.
        has_constant_rows: Whether all microbatches have the same number of tokens.
        falls_back: Whether layers run without torch.compile if it fails.
    """

    def __init__(
        self,
        backend: str = "inductor",
        *,
        has_constant_rows: bool = False,
        falls_back: bool = False,
    ) -> None:
        # torch.compile raises an error beyond this limit. A rare recompilation is better.
        torch._dynamo.config.recompile_limit = 64
        self._backend = backend
        self._has_constant_rows = has_constant_rows
        self._falls_back = falls_back
        self._kinds: dict[Any, LayerKind] = {}
        self._reported: dict[str, int] = {}

    def kinds(self, module: LayeredModule, variant: str = "") -> list[LayerKind]:
        """Return the kind of each layer of a module.

        Args:
            module: Module with the layers.
            variant: Name of a variant, if a run has several graphs of the same layer.
        """
        sizes = module.layer_sizes()
        kinds = []
        for index, layer in module.indexed_layers():
            key = (module.name, type(layer), sizes[index], variant)
            if key not in self._kinds:
                name = ", ".join(
                    [f"layers like {index} of {module.name}", *([variant] if variant else [])]
                )
                self._kinds[key] = LayerKind(
                    name,
                    self._backend,
                    self._kinds,
                    has_constant_tokens=self._has_constant_rows and module.kind == "llm",
                    falls_back=self._falls_back,
                )
            kinds.append(self._kinds[key])
        return kinds

    def new_graphs(self) -> list[CompiledGraph]:
        """Return the graphs that were compiled since the last call."""
        graphs = []
        for kind in self._kinds.values():
            reported = self._reported.get(kind.name, 0)
            for number, compilation in enumerate(kind.compilations[reported:], reported + 1):
                graphs.append(CompiledGraph(kind.name, number, *compilation.statistics()))
            self._reported[kind.name] = len(kind.compilations)
        return graphs

    def log_new_graphs(self, step: int, log: logging.Logger) -> list[CompiledGraph]:
        """Log and return the graphs that were compiled since the last call."""
        graphs = self.new_graphs()
        log_compiled_graphs(graphs, step, log)
        return graphs


def log_compiled_graphs(graphs: Sequence[CompiledGraph], step: int, log: logging.Logger) -> None:
    """Log the graphs of a step. Warn if a kind of layer has too many graphs."""
    if not graphs:
        return
    compile_s = sum(graph.compile_ms for graph in graphs) / 1e3
    cached_graphs = sum(graph.from_cache for graph in graphs)
    text = "step %d: %d graphs of layers compiled in %.1f s, %d of them from %s"
    log.info(
        text, step, len(graphs), compile_s, cached_graphs, os.environ.get(CACHE_VARIABLE, "a cache")
    )
    for graph in graphs:
        if graph.number > MAX_GRAPHS:
            text = "%s have %d compiled graphs, but %d are expected; recompiled because of: %s"
            log.warning(text, graph.kind, graph.number, MAX_GRAPHS, graph.reason)


def mark_dynamic_sizes(value: Any, *, has_constant_tokens: bool = False) -> None:
    """Mark the sizes of layer inputs that change from call to call as dynamic.

    These are all sizes except the last one of floating-point tensors, the number of features.

    Args:
        value: Tensors, or containers of tensors. `None` and other values are skipped.
        has_constant_tokens: Whether the number of tokens does not change. Only the sizes of
            `Segments` that depend on the segments are then dynamic.
    """
    if isinstance(value, Tensor):
        # All layers of a module receive the same tables and segments, marked by the first layer.
        if has_constant_tokens or torch_compat.has_dynamic_sizes(value):
            return
        sizes = value.ndim - value.is_floating_point() if value.ndim > 1 else value.ndim
        torch._dynamo.maybe_mark_dynamic(value, list(range(sizes)))
    elif isinstance(value, Mapping):
        mark_dynamic_sizes(tuple(value.values()), has_constant_tokens=has_constant_tokens)
    elif isinstance(value, tuple | list):
        for part in value:
            mark_dynamic_sizes(part, has_constant_tokens=has_constant_tokens)
    elif has_constant_tokens and isinstance(value, Segments):
        mark_dynamic_sizes((value.cu_seqlens, value.cu_seqlens_host, value.longest))
    elif is_dataclass(value):
        parts = [getattr(value, part.name) for part in fields(value)]
        mark_dynamic_sizes(parts, has_constant_tokens=has_constant_tokens)


def find_compiler_problem(config: CompileConfig, device: str) -> str:
    """Return why torch.compile cannot generate code for a type of device, or "" if it can."""
    missing = find_missing_compiler(device) if config.backend == "inductor" else ""
    return missing and (
        f"torch.compile cannot generate code for this GPU; install {missing}, or set "
        "compile.enabled = false"
    )


def set_compile_cache() -> None:
    """Set a private cache directory for compiled code, unless the user has set one.

    The directory is `torchmm/compile` in XDG_CACHE_HOME, or in `~/.cache`. If it cannot be written,
    torch uses its own default, a directory of this user in the temporary directory.
    """
    # torch sets the variable itself when it first looks up its cache directory.
    if os.environ.get(CACHE_VARIABLE) not in (None, torch_compat.default_code_cache()):
        return
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        directory = Path(cache).expanduser().absolute() / "torchmm" / "compile"
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        make_writable_directory(directory)
    except (OSError, RuntimeError) as error:  # no home directory, or a read-only one
        logger.debug("compiled code is cached in %s: %s", torch_compat.default_code_cache(), error)
        return
    os.environ[CACHE_VARIABLE] = str(directory)
