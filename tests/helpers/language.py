"""Count words and docstrings that the style guide replaces, per folder.

    python tests/helpers/language.py            # print counts and limits
    python tests/helpers/language.py --write    # lower the limits to today's counts
    python tests/helpers/language.py --show docs

`tests/unit/repository/test_language.py` compares the counts with the limits in
`language_limits.json`. A limit may fall, but must not rise.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMITS = ROOT / "tests" / "unit" / "repository" / "language_limits.json"
RUFF_RULES = "D102,D205,D209,D404,D415"
PYTHON_FOLDERS = ("torchmm", "scripts", "benchmarks")
SPELLED = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "recipes", "torchmm", "scripts")
MAX_TEST_WORDS = 8
MAX_SENTENCE_WORDS = 30

REPLACEMENTS = {
    r"tells?|told": "reports, logs, returns (told apart: distinguished)",
    r"beside": "in the background, concurrently with, next to",
    r"apart": "disaggregated, separate",
    r"torn": "corrupt, undecodable, incomplete",
    r"anew": "again, from scratch",
    r"stands?|stood": "is, is stored, is stalled",
    r"wish(?:es)?": "requests, requires",
    r"mend(?:s|ed)?": "fix",
    r"fullest|leanest|busiest|heaviest|likeliest": "highest-memory, most loaded, most likely",
    r"dealt|deals?": "assigned, distributed",
    r"sounds?": "audio",
    r"(?-i:[Cc]lips?)": "video (clip only for gradient clipping)",
    r"pictures?": "image, plot, figure",
    r"drawings?": "generated images",
    r"nobody|somebody|whoever|anybody": "no rank, the caller, another process",
    r"likewise|meanwhile": "also, while ... runs",
    r"(?:is|are|was|were) no(?! longer| more)": "is not a",
    r"of (?:its|their) own": "separate, dedicated, its own X",
    r"(?:its|the|their) like": "list the cases",
    r"by hand": "manually",
    r"so (?:many|much)": "a number or a bound",
    r"go(?:es)? on|trains? on": "continues",
    r"ours|theirs": "torchmm, the baseline",
    r"remedy": "fix, how to fix",
    r"processor time": "CPU time",
    r"one after (?:the other|another)|in turns?": "sequentially, round-robin",
    r"plays?|played": "simulates, replays",
    r"promis\w+": "estimate, predicted gain",
    r"refus\w+": "rejected, not supported",
    r"lets?": "an imperative with the effect; allows",
    r"handed|hands? over": "passed, sent",
    r"travels?|visits?": "is sent, is copied",
    r"alike": "identical, uniform",
    r"whole": "full, complete, unsharded",
}
WORDS = {re.compile(rf"\b(?:{words})\b", re.I): fix for words, fix in REPLACEMENTS.items()}
ANY_WORD = re.compile(rf"\b(?:{'|'.join(REPLACEMENTS)})\b", re.I)
EXCEPTIONS = re.compile(
    r"gradient[- ]clip|clip(?:s|ped)? gradients|clip norm|whole number|whole word|let's"
    r"|connection refused|trains? on (?:a|one|the|your|\d+|GPU|CPU|images?|text|all|both|only)",
    re.I,
)
"""Uses of these words that PyTorch's documentation has, too."""

VERBS = frozenset(
    """
    accept accumulate act add adjust advance align all-gather all-reduce allocate allow announce
    answer append apply ask assemble assert assign attach average balance begin bind block bound
    break broadcast build cache calibrate call cancel capture cast change check choose chunk clamp
    claim classify clean clear clip clone close collect color combine commit compare compile
    complete compress compute concatenate configure connect consume convert copy correct count
    create crop cut damage decode decompress decrease delay delete derive describe detach detect
    determine disable discard dispatch display distribute divide do download draw drop embed emit
    empty enable encode end enqueue ensure enter enumerate escape estimate evaluate evict exchange
    exclude execute exit expand expect export extend extract fail fetch fill filter find finish
    fit flatten flip flush fold follow force fork format forward free freeze gather generate get
    give group guard handle hash hide hold idle ignore import improve include increase index infer
    initialize inject insert inspect install instantiate interleave interpolate intersect
    invalidate iterate join keep kill label launch leave limit link list listen load locate lock
    log look lower make map mark mask match measure merge migrate minimize mock modify move
    multiply name narrow normalize note notify observe offload open order overlap overwrite pack
    pad parallelize parse partition pass patch permute pick pin place plan plot poll pop post
    postpone predict prefetch prepare prepend preserve prevent print probe process produce profile
    project propagate protect provide prune publish pull put quantize query quote raise read
    rebuild recompute receive record recover reduce reduce-scatter refresh register reject release
    reload remember remove rename render reorder repeat replace replay report request require
    reserve reset reshape reshard resize resolve restart restore resume retain retry return reuse
    reverse revert rewrite roll rotate round route run sample save scale scan schedule score
    search seed select send separate serialize serve set shard share shift show shuffle shut
    shutdown signal simulate skip sleep slice solve sort spawn split stack start step stop store
    stream strip subtract sum summarize suppress swap switch sync synchronize take terminate test
    tile time tokenize trace track train transfer transform translate transpose trim truncate try
    tune turn undo unflatten unpack unregister unshard update upload use validate verify visit
    wait walk warn watch wrap write yield zero
    """.split()  # noqa: SIM905
)
NOT_FIRST = frozenset(
    """
    by of for in on at to from with without as what whether how which where who whose their its all
    those these none one same only and but so
    """.split()  # noqa: SIM905
)
"""Prepositions, pronouns and question words, which begin a fragment that needs the signature."""


class Text(NamedTuple):
    """A piece of prose.

    Attributes:
        line: Line number.
        kind: "words" for Markdown, docstrings and comments, "messages" for strings that users see.
        text: Text without code.
    """

    line: int
    kind: str
    text: str


class Hit(NamedTuple):
    """A finding, with its place and what to write instead."""

    place: str
    found: str
    advice: str


def folder_of(path: str) -> str:
    """Return the folder whose limits apply to a file."""
    parts = Path(path).parts
    return "/".join(parts[: 2 if parts[0] in ("torchmm", "benchmarks") and len(parts) > 2 else 1])


def tracked_files() -> list[str]:
    """Return the tracked files with prose."""
    patterns = ["*.md", "*.py", "*.toml", "*.sh"]
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for path in listed.stdout.split() if (ROOT / path).exists()]


def markdown_texts(source: str) -> Iterator[Text]:
    """Yield the paragraphs of a Markdown page without code."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield Text(number, "words", strip_code(line))


@lru_cache(maxsize=1)
def nodes_of(source: str) -> list[ast.AST]:
    """Return the nodes of a module. Several checks walk over them."""
    return list(ast.walk(ast.parse(source)))


def python_texts(source: str) -> Iterator[Text]:
    """Yield docstrings, comments and user-visible strings of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], "words", strip_code(token.string))
    for node in nodes_of(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                for offset, line in enumerate(node.value.value.splitlines()):
                    yield Text(node.lineno + offset, "words", strip_code(line))
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield from string_texts(node.exc)
        elif isinstance(node, ast.Call) and is_message_call(node):
            yield from string_texts(node)


def is_message_call(call: ast.Call) -> bool:
    """Return True if the strings of a call are shown to users: logs, problems and help."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in (
        "debug", "info", "warning", "error", "exception", "Problem", "append", "print",
        "add_argument", "add_parser", "ArgumentParser",
    )  # fmt: skip


def string_texts(node: ast.AST) -> Iterator[Text]:
    """Yield the string constants below a node. Short strings are names and keys."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and " " in child.value:
            yield Text(child.lineno, "messages", strip_code(child.value))


def comment_texts(source: str) -> Iterator[Text]:
    """Yield the comments of a TOML or shell file."""
    for number, line in enumerate(source.splitlines(), 1):
        _, mark, comment = line.partition("#")
        if mark and not line.startswith("#!"):
            yield Text(number, "words", strip_code(comment))


def strip_code(text: str) -> str:
    """Remove inline code, link targets and quoted values."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", text)


def texts(path: str) -> list[Text]:
    """Return the prose of a file."""
    source = (ROOT / path).read_text(encoding="utf-8", errors="replace")
    if path.endswith(".md"):
        return list(markdown_texts(source))
    return list(python_texts(source) if path.endswith(".py") else comment_texts(source))


def functions(nodes: list[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions whose docstrings begin with a verb: no properties and no tests."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            if "property" not in decorators and not node.name.startswith("test_"):
                yield node


def docstring_hits(path: str) -> Iterator[tuple[str, Hit]]:
    """Yield function docstrings without a verb at the beginning, fragments, and long test names."""
    nodes = nodes_of((ROOT / path).read_text(encoding="utf-8", errors="replace"))
    for node in functions(nodes):
        summary = (ast.get_docstring(node) or "").split("\n")[0]
        first = summary.split(" ")[0].rstrip(".,:;").lower()
        if summary and first not in VERBS:
            yield (
                "verbs",
                Hit(f"{path}:{node.lineno}", summary[:60], 'start with a verb, such as "Return"'),
            )
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = (ast.get_docstring(node) or " ").split(" ")[0].rstrip(".,:;").lower()
            if first in NOT_FIRST:
                yield (
                    "fragments",
                    Hit(f"{path}:{node.lineno}", first, "start with a verb or a noun"),
                )
            if node.name.startswith("test_") and node.name.count("_") > MAX_TEST_WORDS:
                advice = f"use at most {MAX_TEST_WORDS} words: test_<unit>_<condition>_<result>"
                yield "test names", Hit(f"{path}:{node.lineno}", node.name, advice)


def word_hits(path: str) -> Iterator[tuple[str, Hit]]:
    """Yield words of a file that the style guide replaces, with the check that counts them."""
    for text in texts(path):
        if ANY_WORD.search(text.text):
            remaining = EXCEPTIONS.sub(" ", text.text)
            for pattern, advice in WORDS.items():
                for match in pattern.finditer(remaining):
                    yield text.kind, Hit(f"{path}:{text.line}", match[0], advice)


def long_sentences(path: str) -> Iterator[Hit]:
    """Yield sentences of a page that have too many words. Tables have no sentences."""
    paragraphs: list[str] = [""]
    for text in markdown_texts((ROOT / path).read_text()):
        line = text.text.strip()
        if not line or line.startswith(("|", "#", "-", "*", "1.", ">")):
            paragraphs.append("")
        if not line.startswith(("|", "#")):
            paragraphs[-1] += f" {line}"
    for paragraph in paragraphs:
        for sentence in re.split(r"(?<=[.!?:])\s", paragraph):
            if len(sentence.split()) > MAX_SENTENCE_WORDS:
                yield Hit(path, sentence.strip()[:70], f"use at most {MAX_SENTENCE_WORDS} words")


def ruff_hits() -> Iterator[tuple[str, Hit]]:
    """Yield findings of ruff's rules on docstrings that are not all met yet."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format", "json"]
    rules = ["--select", RUFF_RULES, "--config", "lint.pydocstyle.convention = 'google'"]
    printed = subprocess.run(
        [*command, *rules, *PYTHON_FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    for found in json.loads(printed.stdout):
        place = f"{Path(found['filename']).relative_to(ROOT)}:{found['location']['row']}"
        yield f"ruff {found['code']}", Hit(place, found["code"], found["message"])


def spelling_hits() -> Iterator[tuple[str, Hit]]:
    """Yield misspelled words, and words in British spelling."""
    command = [sys.executable, "-m", "codespell_lib", "--builtin", "clear,rare,en-GB_to_en-US"]
    printed = subprocess.run(
        [*command, *SPELLED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    for line in printed.stdout.splitlines():
        place, _, words = line.partition(": ")
        found, _, advice = words.partition(" ==> ")
        yield "spelling", Hit(place, found, advice)


def all_hits() -> dict[str, list[Hit]]:
    """Return the findings by folder and check, such as "docs: words"."""
    hits: dict[str, list[Hit]] = {}
    for check, hit in [*ruff_hits(), *spelling_hits()]:
        hits.setdefault(check, []).append(hit)
    for path in tracked_files():
        found = list(word_hits(path))
        if path.endswith(".py"):
            found += docstring_hits(path)
        elif path.startswith(("docs/", "README")):
            found += [("long sentences", hit) for hit in long_sentences(path)]
        for check, hit in found:
            hits.setdefault(f"{folder_of(path)}: {check}", []).append(hit)
    return hits


def main() -> None:
    """Print the counts, or lower the limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="lower the limits to today's counts")
    parser.add_argument("--show", default="", help='print the findings of a folder, such as "docs"')
    arguments = parser.parse_args()
    hits = all_hits()
    if arguments.show:
        for name, found in hits.items():
            if name.startswith(arguments.show):
                lines = [f"{hit.place}: {hit.found!r}: {hit.advice}\n" for hit in found]
                sys.stdout.writelines(lines)
        return
    counts = Counter({name: len(found) for name, found in hits.items()})
    limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else dict(counts)
    for name in sorted(counts | limits):
        sys.stdout.write(f"{name:40} {counts[name]:6} of {limits.get(name, 0):6}\n")
    if arguments.write:
        lowered = {n: min(counts[n], limit) for n, limit in sorted(limits.items()) if counts[n]}
        LIMITS.write_text(json.dumps(lowered, indent=1) + "\n")


if __name__ == "__main__":
    main()
