"""Pretrained weights from safetensors files directly into (sharded) parameters.

Each rank memory-maps the files and reads only the slices of its parameters, so that no rank stores
a complete model. Missing, unexpected and misshapen tensors are listed and rejected before anything
is read, for the complete model, so that ranks with different stages raise the same error. Only new
modules (a new connector) may be missing. Pickled weight files are never opened.

`HuggingFaceStorageReader` of torch also reads only local slices, but does not work here. It
requires one tensor per parameter with the names of the model, while files have other names and one
tensor per expert. It also reads all safetensors files regardless of the index, ignores unexpected
tensors, and stops at the first missing tensor.

Parameters are filled in pieces, as they are in the files. Most are one tensor there. The experts of
a layer are one parameter in the model, (experts, rows, columns) with the rows of gate and up
projection concatenated, and two or three matrices per expert in the files of most families.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

# Private, and not in `parallel.torch_compat`, which models cannot import. No public function
# returns the offset of the local part of a DTensor, which is not trivial for uneven shards.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchmm.common.errors import CheckpointError
from torchmm.common.files import check_relative_name
from torchmm.common.log import report_progress
from torchmm.models.layered import LayeredModule, NewRows, WeightFiles
from torchmm.models.multimodal import MultimodalModel
from torchmm.models.weight_formats import WeightFormat, value_shape, value_slices
from torchmm.recipe.model_section import read_json_object, split_revision

T = TypeVar("T")


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the part of the complete tensor on this rank, as one slice per dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_slice(target: Tensor, full_tensor: Tensor, form: WeightFormat | None = None) -> None:
    """Copy the local shard of the unsharded tensor `full_tensor` into `target`.

    Args:
        target: Tensor or DTensor.
        full_tensor: Values of the complete tensor.
        form: Storage form of `target`, or None if it is a tensor of its values.
    """
    local = local_tensor(target)
    if form is None:
        local.copy_(full_tensor[local_slices(target)])
    else:
        values = full_tensor[value_slices(local_slices(target), form)]
        local.copy_(form.encode(values.to(local.device)))


_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ParameterPiece(NamedTuple):
    """The part of a parameter that one tensor in the files fills."""

    owner: str
    """Name of the parameter."""
    tensor: Tensor
    """The parameter."""
    expert: int | None = None
    """Index of the expert; None for parameters without experts."""
    rows: slice = slice(0, 0)
    """Rows of the matrix of the expert."""
    stacked: bool = False
    """Whether the tensor has all experts. Their matrices may be transposed in the files."""
    share: tuple[int, int] = (0, 1)
    """Index and number of equal parts, if a tensor in the files has several parameters."""
    new_rows: NewRows | None = None
    """Rows that the tensor in the files lacks, if any."""
    form: WeightFormat | None = None
    """Storage form of the parameter, or None if it is a tensor of its values."""

    @property
    def full_shape(self) -> list[int]:
        """The shape of the values of the complete parameter."""
        shape = self.tensor.shape
        return list(shape if self.form is None else value_shape(shape, self.form))

    @property
    def shapes(self) -> list[list[int]]:
        """The shapes that the tensor may have in the files."""
        full_shape = self.full_shape
        if self.new_rows is not None:
            return [[self.new_rows.stored, *full_shape[1:]]]
        if self.share[1] > 1:
            return [[self.share[1] * full_shape[0], *full_shape[1:]], full_shape]
        if self.stacked:
            return [full_shape, [full_shape[0], full_shape[2], full_shape[1]]]
        if self.expert is None:
            return [full_shape]
        return [[self.rows.stop - self.rows.start, self.tensor.shape[2]]]

    def fill(self, stored: Any) -> None:
        """Read the part on this rank from a tensor in the files."""
        local = local_tensor(self.tensor)
        slices = local_slices(self.tensor)
        if not local.numel():
            return
        if self.form is not None:
            slices = value_slices(slices, self.form)
        if self.new_rows is not None:
            _fill_with_new_rows(local, slices, stored, self.new_rows)
            return
        if self.stacked and list(stored.get_shape()) != list(self.tensor.shape):
            experts, rows, columns = slices
            local.copy_(stored[experts, columns, rows].transpose(1, 2))
            return
        if self.expert is None:
            if self.share[1] > 1 and list(stored.get_shape()) != self.full_shape:
                first = self.share[0] * self.tensor.shape[0]
                slices = (slice(slices[0].start + first, slices[0].stop + first), *slices[1:])
            values = stored[slices]
            if self.form is not None:
                values = self.form.encode(values.to(local.device))
            local.copy_(values)
            return
        experts, rows, columns = slices
        start, stop = max(rows.start, self.rows.start), min(rows.stop, self.rows.stop)
        if not experts.start <= self.expert < experts.stop or start >= stop:
            return
        values = stored[start - self.rows.start : stop - self.rows.start, columns]
        local[self.expert - experts.start, start - rows.start : stop - rows.start].copy_(values)


def _fill_with_new_rows(
    local: Tensor, slices: tuple[slice, ...], stored: Any, new_rows: NewRows
) -> None:
    """Read the local rows of a matrix, and fill new rows with the mean of all known rows.

    Every rank sums all known rows in the same order, so that new rows are bitwise identical.
    """
    rows, columns = slices
    stop = min(rows.stop, new_rows.stored)
    if rows.start < stop:
        local[: stop - rows.start].copy_(stored[rows.start : stop, columns])
    added = [row - rows.start for row in new_rows.added if rows.start <= row < rows.stop]
    if not added:
        return
    total = torch.zeros(columns.stop - columns.start, dtype=torch.float64)
    for first in range(0, new_rows.known, _SUMMED_ROWS):
        last = min(first + _SUMMED_ROWS, new_rows.known)
        total += stored[first:last, columns].double().sum(0)
    local[added] = (total / new_rows.known).to(local)


def parameter_pieces(module: LayeredModule) -> dict[str, ParameterPiece]:
    """Return the pieces of the parameters and buffers of a module, by names as in the files."""
    tensors = module.state_dict().items()
    return {
        name: p._replace(form=module.find_weight_format(owner, x))
        for owner, x in tensors
        for name, p in _pieces_of_parameter(owner, x, module.weights)
    }


def _pieces_of_parameter(
    owner: str, tensor: Tensor, files: WeightFiles
) -> Iterator[tuple[str, ParameterPiece]]:
    if files.new_rows is not None and owner in files.new_rows.names:
        yield owner, ParameterPiece(owner, tensor, new_rows=files.new_rows)
        return
    group, _, leaf = owner.rpartition(".")
    if not group.endswith(".mlp.experts") or leaf not in _PROJECTIONS or tensor.ndim != 3:
        fused = (
            (parts, part) for _, parts in files.fused_tensors for part in parts if part in owner
        )
        parts, part = next(fused, (("",), ""))
        yield owner, ParameterPiece(owner, tensor, share=(parts.index(part), len(parts)))
        return
    if files.stacked_experts:
        yield owner, ParameterPiece(owner, tensor, stacked=True)
        return
    size = tensor.shape[1] // len(_PROJECTIONS[leaf])
    for expert in range(tensor.shape[0]):
        for index, projection in enumerate(_PROJECTIONS[leaf]):
            rows = slice(index * size, (index + 1) * size)
            yield (
                f"{group}.{expert}.{projection}.weight",
                ParameterPiece(owner, tensor, expert, rows),
            )


WEIGHTS_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
"""Names in transformers and diffusers. If there are several files, NAME.index.json lists them."""
CONNECTOR_FILE = "connector.safetensors"
MAX_LISTED_NAMES = 8
"""Maximum number of names of one kind in an error message."""
_SUMMED_ROWS = 4096
"""Number of rows of an embedding that are read at once to compute the mean."""
COMPARED_ROWS = 64
"""Number of compared rows of a head and its tied embeddings."""

_IGNORED_TENSORS = re.compile(r"^(mtp|talker|token2wav|code2wav)\.")
"""Layers for multi-token prediction and for the speech of Omni models, which are omitted."""
_COMPUTED_BUFFERS = re.compile(r"(position_ids|rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq)$")
"""Buffers that old files contain and that are computed today."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file."""

    path: Path
    name: str


def load_weights(model: MultimodalModel) -> set[str]:
    """Fill the parameters of all modules that have a source.

    Args:
        model: Materialized model. Parameters are plain tensors or DTensors.

    Returns:
        Names of the parameters with pretrained values. `init_weights` fills the others (new
        connectors, modules without a source) and computed buffers.

    Raises:
        CheckpointError: The files do not fit the model.
    """
    problems: list[str] = []
    filled: set[str] = set()
    expected: dict[str, tuple[list[list[int]], FileTensor]] = {}
    targets_by_name: dict[str, tuple[ParameterPiece, FileTensor]] = {}
    by_source: dict[str, list[tuple[str, LayeredModule, WeightFiles]]] = defaultdict(list)
    for prefix, module in model.named_modality_modules():
        for weights in (module.weights, *module.extra_weights):
            if weights.source is not None:
                by_source[weights.source].append((prefix, module, weights))
    for source, modules in by_source.items():
        files = open_files(source)
        claimed: set[str] = set()
        for prefix, module, weights in modules:
            names = names_in_files(module, files, weights)
            claimed |= set(names.values())
            stored, missing = _match(module, names, weights)
            problems += _list_names(f"{source}: missing for {module.name!r}", missing)
            problems += [f"{source}: {problem}" for problem in _tie_problems(module, names, files)]
            expected |= {f"{prefix}.{n}": (shapes, files[s]) for n, (shapes, s) in stored.items()}
            targets = _local_targets(module, stored)
            targets_by_name |= {f"{prefix}.{n}": (p, files[s]) for n, (p, s) in targets.items()}
            filled |= {f"{prefix}.{piece.owner}" for piece, _ in targets.values()}
        unclaimed = [n for n in files if n not in claimed and not _IGNORED_TENSORS.search(n)]
        stray = [n for n in unclaimed if not _COMPUTED_BUFFERS.search(n)]
        if not modules[0][2].allows_other_tensors:
            problems += _list_names(f"{source}: not part of the model", stray)
    problems += _shape_problems(expected)
    if problems:
        raise CheckpointError("weights do not match the model:\n  - " + "\n  - ".join(problems))
    _read_pieces(targets_by_name)
    return filled


def open_files(source: str) -> dict[str, FileTensor]:
    """Return the tensors of a directory or a repository of the Hub, by their names in the files.

    Raises:
        CheckpointError: No safetensors files exist, or a file is corrupt.
    """
    directory = _local_directory(source)
    files = _weight_files(directory)
    if (directory / CONNECTOR_FILE).is_file():
        files.append(CONNECTOR_FILE)
    tensors = {}
    for file in files:
        try:
            with safe_open(directory / file, "pt") as opened:
                names = opened.keys()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory / file} cannot be read ({error}); download it again"
            ) from error
        tensors.update({name: FileTensor(directory / file, name) for name in names})
    return tensors


def _weight_files(directory: Path) -> list[str]:
    """Return the names of the safetensors files in a directory; links may lead out of it.

    Raises:
        CheckpointError: There are none, or their index is damaged or lists missing files.
    """
    for name in WEIGHTS_FILES:
        index = directory / f"{name}.index.json"
        if index.exists():
            return _indexed_files(index)
        if (directory / name).is_file():
            return [name]
    raise CheckpointError(
        f"{directory} has neither {' nor '.join(WEIGHTS_FILES)}, nor an index of such files; "
        "convert the weights to safetensors (pickle files are not supported)"
    )


def _indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index lists.

    Raises:
        CheckpointError: The index is damaged, or a file is missing or outside of the directory.
    """
    try:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("it has no object weight_map that maps tensors to files")
        names = {check_relative_name(name, f"{index}: weight_map") for name in weight_map.values()}
        missing = sorted(name for name in names if not (index.parent / name).is_file())
    except (OSError, ValueError) as error:
        reason = f"{error}"[:300]
        raise CheckpointError(f"{index} is corrupt: {reason}; download the file again") from error
    if missing:
        listed = ", ".join(missing[:MAX_LISTED_NAMES])
        more = (
            f" and {len(missing) - MAX_LISTED_NAMES} more"
            if len(missing) > MAX_LISTED_NAMES
            else ""
        )
        raise CheckpointError(
            f"files listed in {index} are missing: {listed}{more}; download them again"
        )
    return sorted(names)


def _local_directory(source: str) -> Path:
    """Return the local directory of a source, after downloading it if it is on the Hub."""
    if Path(source).is_dir():
        return Path(source)
    try:
        name, revision = split_revision(source)
        patterns = ["*.safetensors", "*.json"]
        cached = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"

        def downloaded_megabytes() -> int:
            size_bytes = 0
            for file in cached.glob("*"):
                with suppress(OSError):  # a finished file is renamed
                    size_bytes += file.stat().st_size
            return size_bytes // 10**6

        with report_progress(f"fetching {source}", unit="MB", count_completed=downloaded_megabytes):
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"weights of {source!r} are neither in a local directory nor on the Hugging Face "
            f"Hub ({error})"
        ) from error


def names_in_files(
    module: LayeredModule, files: dict[str, FileTensor], weights: WeightFiles | None = None
) -> dict[str, str]:
    """Return names in the files by names in the module, for all stages of the module.

    Args:
        module: The module.
        files: Tensors of the files.
        weights: Names of the files. If None, use those of the module.
    """
    weights = weights or module.weights
    with torch.device("meta"):
        known = set(parameter_pieces(module.build_without_adapters())) | module.unused
    names: dict[str, str] = {}
    for name in files:
        for pattern, replacement in weights.renames:
            module_name, count = re.subn(f"^(?:{pattern})", replacement, name)
            if count:
                for old, new in weights.legacy_names:
                    module_name = re.sub(old, new, module_name)
                parameters = [
                    part for part in _fused_parameters(module_name, weights) if part in known
                ]
                names |= dict.fromkeys(parameters, name)
                break
    return names


def _fused_parameters(name: str, files: WeightFiles) -> list[str]:
    """Return the parameters of which a tensor in the files has the values."""
    for joined, parts in files.fused_tensors:
        if joined in name:
            return [name.replace(joined, part) for part in parts]
    return [name]


def _match(
    module: LayeredModule, names: dict[str, str], weights: WeightFiles
) -> tuple[dict[str, tuple[list[list[int]], str]], list[str]]:
    """Return {name: (shapes, name in the files)} for all stages of a module, and missing names."""
    with torch.device("meta"):
        full_module = module.build_without_adapters()
    tied = full_module.tied_parameters()
    stored, missing = {}, []
    for name, piece in parameter_pieces(full_module).items():
        source = module.weights
        for extra in module.extra_weights:
            if name.startswith(tuple(prefix for prefix, _ in extra.hf_prefixes)):
                source = extra
                break
        if name in tied or source is not weights:
            continue
        if name in names:
            stored[name] = (piece.shapes, names[name])
        elif not name.endswith(weights.optional_suffixes):
            missing.append(name)
    if module.is_connector_new and not any(n.startswith("connector.") for n in stored):
        missing = [n for n in missing if not n.startswith("connector.")]
    return stored, missing


def _tie_problems(
    module: LayeredModule, names: dict[str, str], files: dict[str, FileTensor]
) -> list[str]:
    """Return problems of a head whose values in the files would be lost because it is tied.

    Hugging Face unties such a head and warns. The published config of Mistral Small 3.1, for
    example, omits `tie_word_embeddings`, whose default is now true. Rows in the middle are
    compared, because the first rows may belong to untrained special tokens.
    """
    with torch.device("meta"):
        tied = module.rebuild().tied_parameters()
    return [
        f"{names[copy]} differs from {names[original]}, but the config ties them; set "
        "tie_word_embeddings = false"
        for copy, original in tied.items()
        if copy in names
        and original in names
        and not torch.equal(_middle_rows(files[names[copy]]), _middle_rows(files[names[original]]))
    ]


def _middle_rows(stored: FileTensor) -> Tensor:
    with safe_open(stored.path, "pt") as opened:
        matrix = opened.get_slice(stored.name)
        middle = matrix.get_shape()[0] // 2
        return matrix[middle : middle + COMPARED_ROWS]


def _local_targets(
    module: LayeredModule, stored: dict[str, tuple[list[list[int]], str]]
) -> dict[str, tuple[ParameterPiece, str]]:
    """Return {name: (piece, name in the files)} of this rank."""
    here_once = module.tied_parameters()
    copies = module.tied_replicas()
    targets = {}
    for name, piece in parameter_pieces(module).items():
        original = copies.get(name, name)
        if name not in here_once and original in stored:
            targets[name] = (piece, stored[original][1])
    return targets


def _list_names(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return [f"{what}: {', '.join(names[:MAX_LISTED_NAMES])}{more}"]


def _shape_problems(expected: dict[str, tuple[list[list[int]], FileTensor]]) -> list[str]:
    problems = []
    by_file = _by_file((stored, (name, shape)) for name, (shape, stored) in expected.items())
    for path, entries in by_file.items():
        with safe_open(path, "pt") as opened:
            for stored, (name, shapes) in entries:
                shape = list(opened.get_slice(stored).get_shape())
                if shape not in shapes:
                    problems.append(
                        f"{path}: {stored} has shape {shape}, but {name} of the model has "
                        f"shape {shapes[0]}"
                    )
    return problems


@torch.no_grad()
def _read_pieces(targets: dict[str, tuple[ParameterPiece, FileTensor]]) -> None:
    by_file = _by_file((stored, piece) for piece, stored in targets.values())
    with report_progress("reading weights", len(targets), "tensors") as work:
        for path, entries in by_file.items():
            with safe_open(path, "pt") as opened:
                for name, piece in entries:
                    piece.fill(opened.get_slice(name))
                    work.advance()


def _by_file(entries: Iterable[tuple[FileTensor, T]]) -> dict[Path, list[tuple[str, T]]]:
    """Return entries of tensors by file, with the name of the tensor in the file."""
    by_file: dict[Path, list[tuple[str, T]]] = defaultdict(list)
    for stored, content in entries:
        by_file[stored.path].append((stored.name, content))
    return by_file
