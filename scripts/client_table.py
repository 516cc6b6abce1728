"""Write the table of other programs in docs/reference/model_tests.md from the results of tests.

python -m pytest tests/clients --clients=outputs/clients.jsonl
python scripts/client_table.py outputs/clients.jsonl
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "model_tests.md"
BEGIN = "<!-- programs: written by scripts/client_table.py -->"
END = "<!-- end of programs -->"
ORDER = ("opens", "loss", "tokens", "adapter")
"""Results, in the order in which a cell lists them."""


def main() -> None:
    """Replace the table on the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="output of pytest --clients")
    args = parser.parse_args()
    before, _, following = TARGET.read_text().partition(BEGIN)
    _, _, after = following.partition(END)
    table = "\n".join(lines(args.file.read_text().splitlines()))
    TARGET.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
    print(f"wrote {TARGET}")


def lines(results: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the table: a row per model, a column per program and version.

    Args:
        results: JSON lines with the keys "family", "client", "version" and "what".
    """
    results_by_model: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    versions: dict[str, str] = {}
    for line in results:
        note = json.loads(line)
        results_by_model[note["family"]][note["client"]].add(note["what"])
        versions[note["client"]] = note["version"]
    heads = ["export of", *(f"{client} {version}" for client, version in versions.items())]
    yield row(heads)
    yield "|---" * len(heads) + "|"
    for family, by_client in results_by_model.items():
        cells = (", ".join(what for what in ORDER if what in by_client[c]) for c in versions)
        yield row([family, *cells])


def row(cells: Iterable[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
