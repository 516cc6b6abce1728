"""Tests of the structure of the code: allowed imports, sizes, and banned constructs."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted((ROOT / "torchmm").rglob("*.py"))
ALL_CODE = [
    *MODULES,
    *(f for d in ("scripts", "benchmarks", "tests") for f in sorted((ROOT / d).rglob("*.py"))),
    *sorted(ROOT.glob("*.py")),
]
PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve"}
PICKLING_EXCEPTIONS = {
    ROOT / "tests" / "distributed" / "launch.py"
}  # passes functions to its processes
MAX_FILE_LINES, MAX_FUNCTION_LINES = 800, 100  # split longer functions
MAX_FOLDER_FILES, MAX_TOP_LEVEL = 15, 12

FORBIDDEN_IMPORTS = {  # folders that also must not import some lower folders
    "data": {"models"},
    "costs": {"data", "models", "parallel"},
    "balance/costs": {"data", "models", "parallel"},
    "balance/simulation": {"data", "models", "parallel"},
    "balance/pipeweaver/schedule_search": {"data", "models", "parallel"},
    "balance/pipeweaver/activation_checkpointing": {"data", "models", "parallel"},
    "balance/disttrain/orchestration": {"data", "models", "parallel"},
    "balance/disttrain/reordering": {"data", "models", "parallel"},
}
NO_DISTRIBUTED = ("common", "recipe", "data", "models", *FORBIDDEN_IMPORTS)
EXTENSIONS = ("balance", "extensions")
EXTENSION_IMPORTS = {
    "generation": {"evaluation"},
    "reports": {"balance"},
}
"""Extensions that an extension imports."""
DISTRIBUTED_EXCEPTIONS = {"torchmm/models/hf/export.py"}  # gathers sharded parameters into files
PROGRAMS = {  # programs, such as train.py, can import all folders and are not imported
    "torchmm/data/serve.py",
    "torchmm/data/registry.py",
    "torchmm/extensions/evaluation/lmms_tasks.py",
}
MAX_SQUEEZED_LINES = {  # maximum number of lines with several ideas, by folder; only lower these
    "torchmm/balance/costs": 3,
    "torchmm/balance/measurement": 1,
    "torchmm/balance/pipeweaver/schedule_search": 1,
    "torchmm/balance/pipeweaver/activation_checkpointing": 2,
    "torchmm/common": 1,
    "torchmm/costs": 1,
    "torchmm/data": 3,
    "torchmm/data/media": 3,
    "torchmm/data/sources": 3,
    "torchmm/extensions/async_tp": 5,
    "torchmm/extensions/demo_data": 2,
    "torchmm/extensions/generation/families": 1,
    "torchmm/models": 1,
    "torchmm/models/families/composites": 6,
    "torchmm/models/families/encoders": 4,
    "torchmm/models/hf": 1,
    "torchmm/models/layers": 3,
    "torchmm/parallel/health": 1,
    "torchmm/parallel/tensor": 1,
    "torchmm/pipelining/plan": 7,
    "torchmm/pipelining/run": 3,
    "torchmm/pipelining/view": 2,
    "torchmm/recipe": 4,
    "torchmm/training": 1,
}
LAZY_IMPORTS = {
    "torchmm/extensions/remote/producers/engine.py": "Ray is installed only for producers",
    "torchmm/extensions/remote/serve.py": "an invalid address is reported before torch is loaded",
    "torchmm/planning/first_step.py": "simulated sequences need no data, and no libraries for them",
    **{
        f"torchmm/commands/{name}.py": "arguments and recipe are checked before torch is loaded"
        for name in (
            "dry_run",
            "evaluate",
            "export",
            "generate",
            "inspect_data",
            "plan",
            "prepare_data",
            "simulate",
            "train",
        )
    },
}


RECIPE_READERS = {  # allowed readers of a recipe outside of recipe/ and planning/
    "torchmm/training/run.py": "resolves the recipe of a run",
    "torchmm/training/export/checkpoint.py": "reads the recipe of a checkpoint",
    "torchmm/training/export/model_files.py": "describes the recipe in the model card",
    **{
        f"torchmm/commands/{name}.py": "reads the recipe of a command line"
        for name in ("arguments", "plan", "recipes", "train")
    },
}


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


MAP = load_script("folder_map")
FOLDERS = MAP.FOLDERS


def short(file: Path) -> str:
    return str(file.relative_to(ROOT))


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@functools.cache
def imports_of(file: Path) -> tuple[str, ...]:
    """Return the dotted names of all imports, including TYPE_CHECKING blocks and functions."""
    names: list[str] = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(names)


def folder_of(dotted: str) -> str:
    """Return the top-level folder of a module: data for torchmm.data.loader."""
    return [*dotted.split("."), "__init__"][1]


def top_folder(file: Path) -> str:
    return file.relative_to(ROOT / "torchmm").parts[0].removesuffix(".py")


def torchmm_imports(file: Path) -> list[str]:
    return [name for name in imports_of(file) if name.split(".")[0] == "torchmm"]


IN_FOLDERS = [f for f in MODULES if f.parent != ROOT / "torchmm"]


def wrong_imports(file: Path) -> Iterator[str]:
    """Yield imports of higher folders, of programs, and of forbidden folders."""
    folder_ = top_folder(file)
    for name in torchmm_imports(file):
        imported = folder_of(name)
        if imported in EXTENSIONS and folder_ != "commands":
            continue  # see test_core_does_not_import_extensions
        if name.replace(".", "/") + ".py" in PROGRAMS:
            yield f"{short(file)} imports a program"
        if short(file) in PROGRAMS or name in ("torchmm", "torchmm.__version__"):
            continue
        if FOLDERS.index(imported) > FOLDERS.index(folder_):
            yield f"{short(file)} must not import {name}: {imported} is above {folder_}"
        for folder, forbidden in FORBIDDEN_IMPORTS.items():
            if short(file).startswith(f"torchmm/{folder}/") and imported in forbidden:
                yield f"{short(file)} must not import {name}"


def test_imports_point_downwards():
    assert [problem for file in IN_FOLDERS for problem in wrong_imports(file)] == []


def test_core_does_not_import_extensions():
    violations = {
        f"{short(file)} imports {name}"
        for file in IN_FOLDERS
        if top_folder(file) not in (*EXTENSIONS, "commands") and short(file) not in PROGRAMS
        for name in torchmm_imports(file)
        if folder_of(name) in EXTENSIONS
    }
    assert violations == set(), "the core must not import extensions; add an entry to a table"


def extension_of(dotted: str) -> str | None:
    """Return "balance" or the name of a folder in extensions/, or None for the core."""
    parts = [*dotted.split("."), "", ""]
    return {"balance": "balance", "extensions": parts[2]}.get(parts[1])


def test_extensions_import_declared_extensions_only():
    imports: dict[str, set[str]] = {}
    for file in IN_FOLDERS:
        extension = extension_of(".".join(file.relative_to(ROOT).parts))
        others = {extension_of(name) for name in torchmm_imports(file)} - {extension, None, ""}
        if extension not in (None, "") and others:
            imports.setdefault(extension, set()).update(others)
    assert imports == EXTENSION_IMPORTS


def test_folders_have_few_files():
    names = {f.name for f in (ROOT / "torchmm").iterdir() if f.name != "__pycache__"}
    assert names - {"__init__.py", "__main__.py"} == set(FOLDERS)
    assert len(FOLDERS) <= MAX_TOP_LEVEL
    sizes = {f.parent: len([*f.parent.glob("*.py")]) - 1 for f in IN_FOLDERS}
    assert {short(d): n for d, n in sizes.items() if n > MAX_FOLDER_FILES} == {}


def test_imports_inside_functions_are_declared():
    files = {
        short(file)
        for file in MODULES
        for node in ast.walk(parse(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("torchmm.")
    }
    assert files == set(LAZY_IMPORTS)


PURE = [
    f
    for f in IN_FOLDERS
    if short(f).startswith(tuple(f"torchmm/{folder}/" for folder in NO_DISTRIBUTED))
    and short(f) not in DISTRIBUTED_EXCEPTIONS
]


def test_pure_folders_do_not_import_torch_distributed():
    used = [
        f"{short(file)} imports {name}"
        for file in PURE
        for name in imports_of(file)
        if name.startswith("torch.distributed") and "tensor" not in name
    ]
    assert used == []


def test_modules_have_no_circular_imports():
    names = {
        ".".join(f.relative_to(ROOT).with_suffix("").parts): f
        for f in MODULES
        if f.name != "__init__.py"
    }
    graph = {n: {i for i in torchmm_imports(f) if i in names and i != n} for n, f in names.items()}
    while leaves := {n for n, targets in graph.items() if not targets & graph.keys()}:
        graph = {n: targets for n, targets in graph.items() if n not in leaves}
    assert not graph, f"circular imports of {sorted(graph)}"


def test_folder_file_is_one_docstring():
    """Check that folders import nothing: names are imported from the modules that define them."""
    for file in IN_FOLDERS:
        if file.name == "__init__.py":
            tree = parse(file)
            assert len(tree.body) == 1, short(file)
            assert len((ast.get_docstring(tree) or "").splitlines()) == 1, short(file)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("torchmm", "torch pydantic numpy transformers rich"),
        ("torchmm.recipe.read", "torch numpy"),
        ("torchmm.training.run", "wandb matplotlib torch._inductor.compile_fx"),
    ],
)
def test_importing_is_light(module, heavy):
    code = f"import sys, {module}; print(*[m for m in {heavy.split()!r} if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert loaded.stdout.strip() == ""


def missized(file: Path) -> Iterator[str]:
    """Yield missing docstrings, and the length of files and functions that are too long."""
    tree = parse(file)
    if not ast.get_docstring(tree):
        yield f"{short(file)} has no docstring"
    lines = len(file.read_text().splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{short(file)} has {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{short(file)}: {node.name} has {length} lines"


def test_files_and_functions_are_short():
    assert [problem for file in MODULES for problem in missized(file)] == []


def banned(file: Path) -> Iterator[str]:
    source = file.read_text().splitlines()
    for name in imports_of(file):
        if name.split(".")[0] in PICKLING and file not in PICKLING_EXCEPTIONS:
            yield f"imports {name}: unpickling runs code; use JSON or safetensors"
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call):
            yield from banned_call(node)
        elif isinstance(node, ast.ExceptHandler) and ROOT / "tests" not in file.parents:
            yield from banned_handler(node, source[node.lineno - 1])


def banned_handler(handler: ast.ExceptHandler, line: str) -> Iterator[str]:
    """Yield handlers of all exceptions that neither raise nor have a comment with the limit."""
    caught = "" if handler.type is None else ast.unparse(handler.type)
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
    explained = re.search(r"#.*\b(counted|raised|raises)\b", line)
    if caught in ("", "Exception", "BaseException") and not raises and not explained:
        yield f"line {handler.lineno}: catches everything without saying what limits it"


def banned_call(call: ast.Call) -> Iterator[str]:
    """Yield why a call is banned. Only candidates are converted to text, which is slow."""
    named = {k.arg: k.value for k in call.keywords}
    if isinstance(call.func, ast.Attribute) and call.func.attr == "load":
        safe = "weights_only" in named and ast.unparse(named["weights_only"]) == "True"
        if ast.unparse(call.func) == "torch.load" and not safe:
            yield f"line {call.lineno}: torch.load without weights_only=True"
    for key in ("shell", "trust_remote_code"):
        if key in named and (value := ast.unparse(named[key])) != "False":
            yield f"line {call.lineno}: {key} = {value}"


def test_no_banned_construct_is_used():
    assert [f"{short(file)}: {problem}" for file in ALL_CODE for problem in banned(file)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "subprocess.run(c, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=trust)",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    pass",
    ],
)
def test_banned_constructs_are_detected(tmp_path, code):
    (tmp_path / "code.py").write_text(code)
    assert list(banned(tmp_path / "code.py"))


def literal(node: ast.expr) -> bool:
    """Return True for names, constants, and lists, tuples, sets and dicts of them."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(literal(element) for element in node.elts)
    if isinstance(node, ast.Dict):
        return all(key is not None and literal(key) for key in node.keys) and all(
            literal(value) for value in node.values
        )
    if isinstance(node, ast.UnaryOp):
        return literal(node.operand)
    return isinstance(node, ast.Name | ast.Constant)


def squeezed(tree: ast.AST) -> Iterator[int]:
    """Yield lines of tuples that only save lines: `a, b = x.c, y.d` and `f(*local_tuple)`.

    Swaps and other simultaneous updates need the tuple, because a value reads a target.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and not literal(node.value):
                written = {ast.unparse(element) for element in target.elts}
                read = {ast.unparse(n) for n in ast.walk(node.value) if isinstance(n, ast.expr)}
                if not written & read:
                    yield node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assigned = [n for n in ast.walk(node) if isinstance(n, ast.Assign)]
            tuples = {ast.unparse(n.targets[0]) for n in assigned if isinstance(n.value, ast.Tuple)}
            for call in ast.walk(node):
                for argument in call.args if isinstance(call, ast.Call) else ():
                    if isinstance(argument, ast.Starred) and ast.unparse(argument.value) in tuples:
                        yield call.lineno


def test_lines_contain_one_idea():
    lines_by_folder: dict[str, list[str]] = {}
    for file in MODULES:
        lines = [f"{file.name}:{line}" for line in squeezed(parse(file))]
        lines_by_folder.setdefault(short(file.parent), []).extend(lines)
    excess = {
        folder: f"{len(lines)} squeezed lines, at most {MAX_SQUEEZED_LINES.get(folder, 0)}: {lines}"
        for folder, lines in lines_by_folder.items()
        if len(lines) > MAX_SQUEEZED_LINES.get(folder, 0)
    }
    assert excess == {}, "assign each value on a separate line"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("a, b = x.c, y.d", 1),
        ("a, b = f(x), []", 1),
        ("def f(x):\n    how = x.a, x.b\n    g(*how)", 1),
        ("i, j = 0, -1", 0),
        ("found, seen = [], {}", 0),
        ("a, b = b, a", 0),
        ("v[i], v[j] = v[j], v[i]", 0),
        ("low, high = high, low + x.step", 0),
        ("a, b = pair(x.c)", 0),
        ("def f(*how):\n    g(*how)", 0),
    ],
)
def test_squeezed_lines_are_detected(code, count):
    assert len(list(squeezed(ast.parse(code)))) == count


def test_package_does_not_import_benchmarks_or_tests():
    outside = {"benchmarks", "support", "tests", "scripts"}
    outside |= {f.stem for d in ("tests", "benchmarks") for f in (ROOT / d).rglob("*.py")}
    outside -= {"__init__", "types"} | set(sys.stdlib_module_names)
    libraries = {"torchmm"}
    for file in [*MODULES, ROOT / "train.py"]:
        used = {name.split(".")[0] for name in imports_of(file)} - libraries
        assert not used & outside, f"{short(file)} imports {sorted(used & outside)}"


def test_recipes_are_read_in_declared_files():
    named = {
        short(file)
        for file in MODULES
        if short(file).split("/")[1] not in ("recipe", "planning", *EXTENSIONS)
        if re.search(r"\bRecipe\b", file.read_text())
    }
    assert named == RECIPE_READERS.keys()


def test_recipe_reference_is_up_to_date():
    reference = load_script("recipe_reference")
    assert (ROOT / "docs" / "reference" / "recipes.md").read_text() == reference.render(), (
        "docs/reference/recipes.md is stale: run python scripts/recipe_reference.py"
    )


def test_folder_map_is_up_to_date():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert page == MAP.with_map(page), "the folder map is stale: run python scripts/folder_map.py"
