"""Read recipes: TOML files with inheritance, command-line overrides, and all errors at once.

Mistakes in a recipe are detected before any process group exists and are reported in one
`ConfigError`, one line per problem: `file: section.key = value: problem; fix`. The origin of every
value (a file or "command line") is stored, so that a mistake in a base recipe is reported with the
path of that base.

Steps: TOML files -> merged table + origins -> schema (`torchmm.recipe.recipe`) -> value checks.
Keys with invalid values are replaced by their defaults, so that the value checks still run on the
other keys. A problem that can follow from an invalid key is dropped.

Not supported: argparse flags for every key (a second definition of each key), a list of bases
(their precedence is hard to follow), and deleting inherited keys (keep bases small instead).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from pydantic import ValidationError

from torchmm.common.errors import ConfigError
from torchmm.recipe.check import MeshSizes, find_problems
from torchmm.recipe.explain import (
    Problem,
    explain_error,
    is_name_keyed,
    requires_string,
    shorten,
    type_below,
    upgrade_recipe,
    without_indices,
    without_removed_keys,
)
from torchmm.recipe.placement_sizes import resolve_sizes
from torchmm.recipe.recipe import Recipe

__all__ = [
    "LoadedRecipe",
    "MeshSizes",
    "check_recipe",
    "dump_recipe",
    "find_recipe",
    "list_recipes",
    "load_recipe",
    "recipes_directory",
    "resolve_sizes",
]

COMMAND_LINE = "command line"
MAX_NAME_BYTES = 255
"""Limit of Linux file systems for the name of a file."""

Table = dict[str, Any]


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe and where each value that is not a default was set."""

    recipe: Recipe
    origins: dict[str, str]
    """File, or "command line", by dotted key."""


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), world_size: int | None = None
) -> LoadedRecipe:
    """Read a recipe file, its bases and overrides such as `["--training.steps", "20"]`.

    `path` and bases may be names of recipes that are included in torchmm, see `find_recipe`. If
    `world_size` (number of ranks) is not None, the values are also checked, see `check_recipe`, and
    problems of both kinds are reported together.

    Raises:
        ConfigError: The recipe has problems. The error lists all of them.
    """
    table: Table = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for file, content in _read_chain(find_recipe(Path(path)), problems):
        _merge_layer(table, content, str(file), origins, problems)
    set_values: Table = {}
    for key_path, value in _parse_overrides(overrides, problems):
        nested = value
        for key in reversed(key_path):
            nested = {key: nested}
        _merge(set_values, nested, COMMAND_LINE, {})
    _merge_layer(table, set_values, COMMAND_LINE, origins, problems)
    if problems:  # files missing or unreadable: anything further would be a consequence
        raise ConfigError(problems)

    table = without_removed_keys(table, only_defaults=True)
    unusable = _unusable_values(table)
    recipe, schema_problems = _validate(table)
    all_problems = [*unusable, *schema_problems]
    if world_size is not None:
        suspects = {without_indices(k) for p in all_problems for k in (p.key, *p.depends_on)}
        checked = find_problems(recipe, world_size)
        all_problems += [p for p in checked if not any(p.touches(key) for key in suspects)]
    if all_problems:
        raise ConfigError([f"{_origin(p.key, origins, str(path))}: {p}" for p in all_problems])
    return LoadedRecipe(recipe, origins)


def check_recipe(recipe: Recipe, world_size: int | None) -> list[str]:
    """Check values against each other, the disk and the number of ranks (None if unknown)."""
    return [str(p) for p in find_problems(recipe, world_size)]


def dump_recipe(recipe: Recipe) -> str:
    """Return all keys except None as TOML. Loading the text returns an equal recipe."""
    tables = recipe.model_dump(exclude_none=True)
    if recipe.training.epochs is not None:
        del tables["training"]["steps"]
    return tomli_w.dumps(tables)


def changed_values(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults, by dotted key.

    For a recipe of another version that cannot be validated, return all values.

    Args:
        tables: Recipe as nested tables.
    """
    try:
        recipe = Recipe.model_validate(upgrade_recipe(tables))
    except ValueError:
        return dotted_values(tables)
    return dotted_values(recipe.model_dump(mode="json", exclude_defaults=True, exclude_none=True))


def dotted_values(tables: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            values |= dotted_values(value, f"{name}.")
        else:
            values[name] = value
    return values


def recipes_directory() -> Path:
    """Return the directory of the recipes that are included in torchmm.

    A wheel has them inside the package, a clone next to the package.
    """
    package = Path(__file__).parents[1]
    packaged = package / "recipes"
    return packaged if packaged.is_dir() else package.parent / "recipes"


def find_recipe(name: Path, directory: Path = Path()) -> Path:
    """Return the path of a recipe: a file, or an included recipe of that name.

    `zoo/NAME`, `zoo/NAME.toml` and `recipes/zoo/NAME.toml` name the same included recipe. A file
    has precedence over an included recipe. If neither exists, return the path of the file.

    Args:
        name: File or name.
        directory: Directory of relative files.
    """
    file = directory / name
    if name.is_absolute() or not name.name or ".." in name.parts or _is_file(file):
        return file
    parts = name.parts[1:] if name.parts[0] == "recipes" else name.parts
    packaged = recipes_directory().joinpath(*parts)
    if packaged.suffix != ".toml":
        packaged = packaged.with_name(f"{packaged.name}.toml")
    return packaged if _is_file(packaged) else file


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def list_recipes(folder: Path) -> list[tuple[Path, str]]:
    """Return the recipes below a folder with their descriptions, sorted by depth.

    The description is the comment at the start of a file. Files without a description (user
    recipes) and files without a name (bases of other recipes) are omitted.
    """
    recipes = []
    for file in sorted(folder.rglob("*.toml"), key=lambda file: (len(file.parts), file)):
        text = file.read_text()
        lines = takewhile(lambda line: line.startswith("# "), text.splitlines())
        description = " ".join(line[2:].strip() for line in lines)
        if description and re.search(r'^name = "', text, re.MULTILINE):
            recipes.append((file, description))
    return recipes


def training_recipe_toml(recipe: Recipe) -> str:
    """Return the model and training sections of a recipe as TOML, without paths and data."""
    sections = {"model", "freeze", "adapters", "training", "optimizer", "parallel", "float8"}
    table = recipe.model_dump(
        mode="json", include=sections, exclude_defaults=True, exclude_none=True
    )
    # Checkpoints store recipes as JSON, which does not retain the key order of the file.
    return tomli_w.dumps({name: _sort_keys(section) for name, section in table.items()})


def _sort_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sort_keys(value[key]) for key in sorted(value)}
    return value


# --- reading -------------------------------------------------------------------------------------


def _read_chain(path: Path, problems: list[str]) -> list[tuple[Path, Table]]:
    """Return the file and its bases with their contents, deepest base first."""
    chain: list[tuple[Path, Table]] = []
    visited: list[Path] = []
    file: Path | None = path
    while file is not None:
        if file.resolve() in visited:
            problems.append(
                f"{chain[-1][0]}: base = {shorten(str(file))}: circular base; "
                "remove one of the base keys"
            )
            break
        visited.append(file.resolve())
        content = _read_toml(file, chain[-1][0] if chain else None, problems)
        if file.name == "recipe.toml" and file.with_name("STATUS.json").is_file():  # of a run
            content = upgrade_recipe(content)
        base = content.pop("base", None)
        chain.append((file, content))
        if base is not None and not isinstance(base, str):
            problems.append(f"{file}: base = {shorten(base)}: must be one file name in quotes")
            base = None
        file = None if base is None else find_recipe(Path(base), file.parent)
    return chain[::-1]


def _read_toml(file: Path, named_by: Path | None, problems: list[str]) -> Table:
    try:
        return tomli.loads(file.read_text(encoding="utf-8"))
    except tomli.TOMLDecodeError as error:
        problems.append(
            f"{file}: invalid TOML: {error}; fix the line. Each key may appear only once"
        )
    except UnicodeDecodeError as error:
        problems.append(f"{file}: not UTF-8 text: {error}; save it as UTF-8")
    except (RecursionError, ValueError) as error:  # of arrays in arrays; of numbers of any length
        problems.append(f"{file}: not a recipe: {error}")
    except OSError as error:
        by = f" (base of {named_by})" if named_by else ""
        problems.append(f"{file}{by}: cannot be read: {error.strerror}; check the path")
    return {}


def _parse_overrides(
    overrides: Sequence[str], problems: list[str]
) -> Iterator[tuple[list[str], Any]]:
    """Yield (key path, value) of `--a.b value` and `--a.b=value` arguments."""
    arguments = list(overrides)
    while arguments:
        argument = arguments.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            problems.append(
                f"{COMMAND_LINE}: {argument}: is not an override; use --section.key value"
            )
            continue
        if not equals:
            if not arguments or arguments[0].startswith("--"):
                problems.append(f"{COMMAND_LINE}: {key}: has no value; use --{key} VALUE")
                continue
            text = arguments.pop(0)
        key_path, annotation = _split_key(key)
        try:
            value = _parse_value(text, annotation)
        except (RecursionError, ValueError) as error:
            problems.append(f"{COMMAND_LINE}: {key} = {text[:60]}: is not a valid value: {error}")
            continue
        yield key_path, value


def _parse_value(text: str, annotation: Any) -> Any:
    """Parse a value as TOML. Return the text if a string is required or the text is not TOML."""
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    value = parsed["value"] if len(parsed) == 1 else text
    return text if requires_string(annotation) and not isinstance(value, str) else value


def _split_key(key: str) -> tuple[list[str], Any]:
    """Return key path and type of a dotted key. Names such as "vision.connector" are not split."""
    path: list[str] = []
    annotation: Any = Recipe
    parts = key.split(".")
    while parts:
        if is_name_keyed(annotation):
            parts = [".".join(parts)]
        path.append(parts.pop(0))
        annotation = type_below(annotation, path[-1])
    return path, annotation


def _merge_layer(
    target: Table, layer: Table, origin: str, origins: dict[str, str], problems: list[str]
) -> None:
    """Merge a file or the command line. `training.steps` replaces `epochs` and vice versa."""
    training = layer.get("training")
    set_keys = {"steps", "epochs"} & set(training if isinstance(training, dict) else ())
    if len(set_keys) == 2:
        problems.append(
            f"{origin}: training.steps and training.epochs are both set; remove one of them"
        )
    if set_keys and isinstance(target.get("training"), dict):
        for replaced in {"steps", "epochs"} - set_keys:
            target["training"].pop(replaced, None)
            origins.pop(f"training.{replaced}", None)
    _merge(target, layer, origin, origins)


def _merge(
    target: Table, addition: Table, origin: str, origins: dict[str, str], prefix: str = ""
) -> None:
    """Merge tables in place. Scalars and lists are replaced.

    `origins` stores the source of each leaf.
    """
    for name, value in addition.items():
        key = prefix + name
        if isinstance(value, dict) and value:
            if not isinstance(target.get(name), dict):
                target[name] = {}
            _merge(target[name], value, origin, origins, key + ".")
        elif not (value == {} and isinstance(target.get(name), dict)):
            target[name] = value
            for stale in [k for k in origins if k.startswith(key + ".")]:
                del origins[stale]
            origins[key] = origin


def _origin(key: str, origins: dict[str, str], default: str) -> str:
    """Return the origin of a key, or else that of an enclosing table, or of a key inside."""
    plain_key = without_indices(key)
    around = plain_key
    while around:
        if around in origins:
            return origins[around]
        around = around.rpartition(".")[0]
    return next((o for k, o in origins.items() if k.startswith(plain_key + ".")), default)


def _validate(table: Table) -> tuple[Recipe, list[Problem]]:
    """Return the recipe, with defaults for invalid keys, and the problems of these keys."""
    problems: list[Problem] = []
    while True:  # removing a faulty value may bring up a missing key, never the same error again
        try:
            return Recipe.model_validate(table), problems
        except ValidationError as error:
            for item in error.errors(include_url=False):
                problems.append(explain_error(item))
                _remove(table, item["loc"])


def _unusable_values(table: Any, key: str = "") -> list[Problem]:
    """Return problems of integers beyond 64 bits and of names that are too long for files.

    Such values would raise errors of the operating system at any use. They are removed from the
    table or replaced.
    """
    problems: list[Problem] = []
    for name, value in list(table.items() if isinstance(table, dict) else enumerate(table)):
        inside = f"{key}[{name}]" if isinstance(name, int) else f"{key}.{name}" if key else name
        if isinstance(value, (dict, list)):
            problems += _unusable_values(value, inside)
        elif isinstance(value, int) and abs(value) >= 2**63:
            problems.append(Problem(inside, value, "does not fit in 64 bits; lower it"))
            if isinstance(table, dict):
                del table[name]
            else:
                table[name] = 0
        elif isinstance(value, str) and name != "prompt" and not _is_file_name(value):
            text = (
                f"has a path component longer than {MAX_NAME_BYTES} bytes or a null "
                "character; shorten it"
            )
            problems.append(Problem(inside, value, text))
            table[name] = "unusable"
    return problems


def _is_file_name(value: str) -> bool:
    data = value.encode(errors="surrogatepass")
    return b"\0" not in data and max(map(len, data.split(b"/"))) <= MAX_NAME_BYTES


def _remove(table: Any, loc: tuple[int | str, ...]) -> None:
    """Delete the value at `loc`, or the list that contains it, so that no list index changes."""
    for depth, part in enumerate(loc):
        is_list_next = isinstance(table, dict) and isinstance(table.get(part), list)
        if is_list_next or depth == len(loc) - 1 or part not in table:
            table.pop(part, None)
            return
        table = table[part]
