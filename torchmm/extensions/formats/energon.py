"""Read Megatron-Energon datasets without Energon: shards, and their description in `.nv-meta`.

    .nv-meta/dataset.yaml   sample type; `field_map`: maps fields to parts of a sample
    .nv-meta/split.yaml     `split_parts`: shards of each split; `exclude`: shards, SHARD/KEY

`split.json` may replace `split.yaml`. Fields become the columns of a caption, a chat or an
interleaved document, so that later modules are independent of Energon. Code in the dataset
(`sample_loader`, `part_filter`, classes of other modules) never runs, and no part is unpickled.
Datasets that depend on either are rejected with the name of the key. The format is described in the
Energon documentation, "Dataset Format on Disk".
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchmm.common.errors import DataError
from torchmm.common.files import UnsafeNameError, check_relative_name
from torchmm.data.corrupt import CorruptSampleError, record_errors_at
from torchmm.data.files.offset_cache import OffsetCache
from torchmm.data.files.remote_files import AnyFile, FileSystem, RemoteFile, RemotePath
from torchmm.data.files.urls import is_glob
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.formats import ENERGON_META as META
from torchmm.data.sources.formats import check_hub_keys, is_energon, source_directory
from torchmm.data.sources.source_options import MapSource, Split
from torchmm.data.sources.tar_samples import Parts, TarSamples, decode_part
from torchmm.recipe.data_section import SourceConfig

PICKLED = {"jpgs", "mp4s", "videos", "pkl", "pickle", "pyd"}
"""Sample parts that webdataset and ChatML loaders unpickle."""
CHATS = ("ChatML", "MultimodalChat")
MAX_NODES = 2_000_000
"""Maximum number of values in a file of `.nv-meta`."""
MAX_CHARACTERS = 200_000_000
"""Maximum number of characters of all shard names after brace expansion."""
_NUMBERS = re.compile(r"([0-9]{1,15})\.\.([0-9]{1,15})")
_BRACES = re.compile(r"\{([^{}]*)\}")
_ACCESS = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")

Columns = dict[str, Any]
Directory = Path | RemotePath


class EnergonFormat:
    """Format "energon", see `SourceFormat`."""

    def find_files(self, config: SourceConfig, storage: FileSystem | None) -> list[AnyFile] | None:
        """Return the files of an Energon dataset. None if the source is not one.

        Raises:
            ConfigError: The source has keys of hub data sets.
            DataError: The recipe sets format = "energon", but the source has another format.
        """
        directory = source_directory(config, storage)
        if not is_glob(config.path) and is_energon(directory):
            check_hub_keys(config)
            return open_folder(directory, Split.of(config).name).files
        if config.format == "auto":
            return None
        check_hub_keys(config)
        raise DataError(
            f"source {config.path!r}: not a directory with .nv-meta; correct `path`, or set "
            'format = "webdataset" to read only its tar files'
        )

    def open(
        self,
        config: SourceConfig,
        files: Sequence[AnyFile],
        fingerprint: str,
        offset_cache: OffsetCache,
    ) -> MapSource:
        """Open an Energon dataset. Raise DataError if it cannot be read."""
        storage = next((file.storage for file in files if isinstance(file, RemoteFile)), None)
        folder = open_folder(source_directory(config, storage), Split.of(config).name)
        return EnergonSource(folder, fingerprint, offset_cache)


@dataclass(frozen=True)
class EnergonFolder:
    """Content of `.nv-meta` for one split."""

    directory: Directory
    kind: str
    """Sample type, a key of `KINDS`."""
    fields: dict[str, list[list[str]]]
    """Maps a field to its possible locations: names of a sample part and of keys inside it."""
    shards: list[AnyFile]
    described_by: list[AnyFile]
    left_out: dict[AnyFile, set[str]] = field(default_factory=dict)

    @property
    def files(self) -> list[AnyFile]:
        """Return all files that determine the samples."""
        return self.described_by + self.shards


class EnergonSource:
    """Samples of a dataset as records.

    Args:
        folder: Content of `.nv-meta` for the split.
        fingerprint: Fingerprint of the files.
        offset_cache: Cache of sample positions in shards.
    """

    def __init__(
        self, folder: EnergonFolder, fingerprint: str, offset_cache: OffsetCache | None = None
    ) -> None:
        self._folder = folder
        self._samples = TarSamples(folder.shards, folder.left_out, offset_cache)
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, index: int) -> Record:
        """Return a record. May raise CorruptSampleError."""
        location, parts = self._samples.read(index)
        fields = self._folder.fields
        with record_errors_at(location):
            given = {name: self._find(name, parts, options) for name, options in fields.items()}
            columns = KINDS[self._folder.kind](given, parts)
        directory = self._folder.directory
        root = str(directory) if isinstance(directory, Path) else directory
        return Record(columns, root, location=location)

    def _find(self, name: str, parts: Parts, options: Sequence[Sequence[str]]) -> Any:
        """Return the value of a field from the first available location."""
        for part, *keys in options:
            if part not in parts:
                continue
            value = decode_part(part, parts[part])
            try:
                for key in keys:
                    value = value[int(key) if isinstance(value, list) else key]
            except (KeyError, IndexError, ValueError, TypeError):
                continue
            return value
        if self._folder.kind in CHATS and name != "conversation":
            return None  # files are optional in chats
        locations = ", ".join(part + "".join(f"[{k}]" for k in keys) for part, *keys in options)
        raise CorruptSampleError(f"has no {locations} for field {name}, only {', '.join(parts)}")


def open_folder(directory: Directory, split: str) -> EnergonFolder:
    """Read `.nv-meta`.

    Raises:
        DataError: It is incomplete, does not have this split, or requires code that torchmm does
            not run.
    """
    if isinstance(directory, Path):
        directory = directory.absolute()
    find = _file_finder(directory)
    meta = {name: find(f"{META}/{name}") for name in ("dataset.yaml", "split.json", "split.yaml")}
    files = [file for file in meta.values() if file is not None]
    kind, fields = _read_kind(
        _require_file(meta["dataset.yaml"], f"{directory}/{META}/dataset.yaml")
    )
    file = _require_file(meta["split.yaml"] or meta["split.json"], f"{directory}/{META}/split.yaml")
    splits = _load(file)
    parts = splits.get("split_parts")
    if not isinstance(parts, dict):
        raise DataError(f"{file} has no split_parts; run energon prepare again")
    name = "val" if split == "validation" and split not in parts else split
    if not parts.get(name):
        known = ", ".join(str(key) for key, shards in parts.items() if shards)
        raise DataError(f"{file} has no shards for split {split!r}; use one of {known}")
    excluded = set(_expand(splits.get("exclude") or [], f"{file}: exclude"))
    shards: list[AnyFile] = []
    for shard_name in _expand(parts[name], f"{file}: split_parts.{name}"):
        if shard_name in excluded:
            continue
        shard = find(_relative(shard_name, f"{file}: split_parts.{name}"))
        if shard is None:
            raise DataError(
                f"{file} lists {directory}/{shard_name}, which does not exist; download it, "
                "or run energon prepare again"
            )
        shards.append(shard)
    left_out: dict[AnyFile, set[str]] = {}
    for entry in excluded:
        of_shard, _, key = entry.rpartition("/")
        if of_shard and (shard := find(_relative(of_shard, f"{file}: exclude"))) is not None:
            left_out.setdefault(shard, set()).add(key)
    return EnergonFolder(directory, kind, fields, shards, files, left_out)


def _require_file(file: AnyFile | None, name: str) -> AnyFile:
    if file is None:
        raise DataError(f"{name} cannot be read: no such file; run energon prepare again")
    return file


def _file_finder(directory: Directory) -> Callable[[str], AnyFile | None]:
    """Return a function that finds a file of the directory by its name."""
    listed: dict[str, RemoteFile] = {}
    if isinstance(directory, RemotePath):  # one request, because a dataset may have many shards
        listed = {file.url: file for file in directory.storage.list(directory.url)}

    def find(name: str) -> AnyFile | None:
        if isinstance(directory, RemotePath):
            named = directory.join(name)
            if named is None:
                return None
            return listed.get(named.url) or named.find()  # hidden files are not listed
        path = directory / name
        try:
            return path if path.is_file() else None
        except OSError as error:
            text = f"{name!r:.200} in {directory} cannot be read: {error.strerror}"
            raise DataError(text) from error

    return find


def _read_kind(file: AnyFile) -> tuple[str, dict[str, list[list[str]]]]:
    """Return the sample type and the locations of its fields."""
    described = _load(file)
    sample_type = described.get("sample_type") or described
    if not isinstance(sample_type, dict):
        raise DataError(f"{file}: sample_type is not a mapping; run energon prepare again")
    name = str(sample_type.get("__class__", ""))
    kind = re.sub(r"(Webdataset|Sample)(Factory)?$", "", name)
    if code := [key for key in ("sample_loader", "part_filter") if key in described]:
        raise DataError(
            f"{file}: {code[0]} = {described[code[0]]!r:.200} is Python code, which torchmm "
            "does not run; map the fields with field_map, or set __class__: CrudeWebdataset "
            "if samples have the columns that docs/reference/data_formats.md lists"
        )
    if kind not in KINDS:
        raise DataError(
            f"{file}: __class__ = {name!r:.200} is not supported; use one of {', '.join(KINDS)}"
        )
    mapped = described.get("field_map") or {}
    if not isinstance(mapped, dict) or not all(isinstance(v, str) for v in mapped.values()):
        raise DataError(
            f"{file}: field_map = {mapped!r:.200} is not a mapping of strings; write each "
            "field as FIELD: PART or FIELD: PART[KEY]"
        )
    if not mapped and kind != "Crude":
        raise DataError(f"{file}: {name} has no field_map; run energon prepare again")
    fields: dict[str, list[list[str]]] = {}
    for key, value in mapped.items():
        # "jpg,png" becomes [["jpg"], ["png"]], and "json[0][value]" [["json", "0", "value"]].
        options: list[list[str]] = []
        for access in map(str.strip, value.split(",")):
            match = _ACCESS.fullmatch(access)
            inside = re.findall(r"\[([^\[\]]+)\]", match[2]) if match else []
            options.append([match[1] if match else access, *inside])
        fields[str(key)] = options
    parts = {option[0].rpartition(".")[2] for options in fields.values() for option in options}
    if pickled := sorted(parts & PICKLED):
        raise DataError(
            f"{file}: field_map reads {pickled[0]!r}, which is a pickle; pickle files are not "
            "supported, because unpickling may run code. Write each image or video as a "
            "separate part, and their names into the json of the sample, as in imgs: "
            "json[images]"
        )
    return kind, fields


class _Loader(yaml.SafeLoader):
    """YAML without merge keys, because nested merges grow exponentially."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Raise ConstructorError if a mapping has a merge key."""
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "merge keys (<<) are not supported", node.start_mark
            )


def _load(file: AnyFile) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_bytes(), _Loader)
        nodes = _count_nodes(content, {})
    except (OSError, yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{file} cannot be read: {str(error)[:500]}; run energon prepare again"
        ) from error
    if nodes > MAX_NODES:
        raise DataError(
            f"{file} has {nodes:.3g} values once its aliases are written out, at most "
            f"{MAX_NODES:,} are supported; run energon prepare again"
        )
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a mapping; run energon prepare again")
    return content


def _count_nodes(value: Any, counts: dict[int, int]) -> int:
    """Return the number of values in `value`, in which aliases are shared objects.

    Raises:
        RecursionError: `value` contains itself.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) in counts:
        if not counts[id(value)]:
            raise RecursionError("an alias refers to a value that contains it")
        return counts[id(value)]
    counts[id(value)] = 0
    items = value.values() if isinstance(value, dict) else value
    counts[id(value)] = min(1 + sum(_count_nodes(item, counts) for item in items), 10**18)
    return counts[id(value)]


def _relative(name: str, location: str) -> str:
    try:
        return check_relative_name(name, location)
    except UnsafeNameError as error:
        raise DataError(str(error)) from error


def _expand(names: Any, location: str) -> list[str]:
    """Return names with shell braces written out, such as part_{000..002}.tar and {a,b}.tar.

    Args:
        names: List of names, as read from the file.
        location: File and key, for messages.

    Raises:
        DataError: It is not a list of names, or the names would fill the memory.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{location} = {names!r:.200} is not a list of names; write one name per line"
        )
    expanded: list[str] = []
    characters = 0
    for name in names:
        pieces: list[Sequence[str] | tuple[range, int]] = []
        count = 1
        for number, piece in enumerate(_BRACES.split(name)):
            if number % 2 == 0:
                pieces.append([piece])
            elif numbers := _NUMBERS.fullmatch(piece):
                first, last = numbers.groups()
                values = range(int(first), int(last) + 1)
                pieces.append((values, len(first)))
                count *= len(values)
            else:
                pieces.append(piece.split(","))
                count *= len(pieces[-1])
        characters += count * len(name)
        if characters > MAX_CHARACTERS:
            raise DataError(
                f"{location}: {name!r:.200} stands for {count:.3g} names; at most "
                f"{MAX_CHARACTERS:,} characters of names are supported"
            )
        written = [
            [f"{n:0{piece[1]}d}" for n in piece[0]] if isinstance(piece, tuple) else piece
            for piece in pieces
        ]
        expanded += ["".join(chosen) for chosen in itertools.product(*written)]
    return expanded


def _caption(fields: Columns, _: Parts) -> Columns:
    return {"image": fields.get("image"), "text": fields.get("caption")}


def _text(fields: Columns, _: Parts) -> Columns:
    return {"image": fields.get("image"), "text": fields.get("text")}


def _question(fields: Columns, _: Parts) -> Columns:
    """Return columns of a question about an image or a video, and its best answer."""
    kind = "video" if "video" in fields else "image"
    answers = fields.get("answers")
    if isinstance(answers, list):
        weights = fields.get("answer_weights")
        best = 0
        if isinstance(weights, list) and weights:
            best = weights.index(max(weights))
        answers = answers[best] if best < len(answers) else None
    if not isinstance(answers, str):
        raise CorruptSampleError("has no answer")
    # Questions that were converted from the LLaVA format still have the image placeholder.
    context = str(fields.get("context") or "").replace(f"<{kind}>", "").strip()
    content = [{"type": kind}, {"type": "text", "text": context}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answers}]
    return {"messages": messages, f"{kind}s": [fields.get(kind)]}


def _interleaved(fields: Columns, parts: Parts) -> Columns:
    """Return columns of interleaved text and images, in one sequence or in two lists with gaps."""
    sequence = fields.get("sequence", fields)
    if isinstance(sequence, dict):
        return _with_members(sequence, parts)
    if not isinstance(sequence, list):
        raise CorruptSampleError(f"sequence is {type(sequence).__name__}, not a list")
    files = [parts.get(item.lower()) if isinstance(item, str) else None for item in sequence]
    texts = [item if file is None else None for item, file in zip(sequence, files, strict=True)]
    return {"images": files, "texts": texts}


def _chat(fields: Columns, parts: Parts) -> Columns:
    """Return columns of a conversation and its files."""
    conversation = fields.get("conversation")
    if isinstance(conversation, str | bytes):
        try:
            conversation = json.loads(conversation)
        except (ValueError, RecursionError) as error:
            raise CorruptSampleError(f"conversation: {error}") from error
    columns = dict(conversation) if isinstance(conversation, dict) else {}
    if isinstance(conversation, list):
        roles = all(isinstance(turn, dict) and "role" in turn for turn in conversation)
        columns["messages" if roles else "conversations"] = conversation
    for name, column in (("imgs", "images"), ("videos", "videos"), ("audio", "audios")):
        value = fields.get(name)
        if value is not None:
            columns[column] = value if isinstance(value, list) else [value]
    return _with_members(columns, parts)


def _raw_sample(_: Columns, parts: Parts) -> Columns:
    """Return the sample parts unchanged, and the columns inside `json`."""
    columns = {part: decode_part(part, data) for part, data in parts.items()}
    inner = columns.get("json")
    if isinstance(inner, dict):
        columns = {**inner, **{part: value for part, value in columns.items() if part != "json"}}
    return _with_members(columns, parts)


def _with_members(columns: Columns, parts: Parts) -> Columns:
    """Replace file names in columns by the content of the files, if they are sample parts."""
    columns = dict(columns)
    for column in ("images", "videos", "audios"):
        if isinstance(columns.get(column), list):
            columns[column] = [
                parts.get(name.lower(), name) if isinstance(name, str) else name
                for name in columns[column]
            ]
    return columns


KINDS: dict[str, Callable[[Columns, Parts], Columns]] = {
    "Captioning": _caption,
    "Text": _text,
    "OCR": _text,
    "VQA": _question,
    "VidQA": _question,
    "Interleaved": _interleaved,
    **dict.fromkeys(CHATS, _chat),
    "Crude": _raw_sample,
}
"""Maps a sample type to the function from fields and sample parts to columns.

The key is the class name without "Webdataset" and "Sample".
"""
