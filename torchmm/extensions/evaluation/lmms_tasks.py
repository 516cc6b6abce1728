r"""Lets an export answer tasks of lmms-eval; `benchmarks.py` runs it, with the Python of
`scripts/lmms_eval.sh`.

    .lmms-eval/bin/python -m torchmm.extensions.evaluation.lmms_tasks outputs/mine/hf \
        --tasks mmmu_val --output scores.json

Questions are read as a source of question records, so prompts are those of training (the chat
template, pixels), and texts are written as in `torchmm.extensions.evaluation.exported`. Rejected:
lmms-eval's own class for Hugging Face models, which passes processors what transformers 5 refuses,
and computes in bfloat16 whatever the weights are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmms_eval.api.model import lmms
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.tasks import TaskManager
from PIL import Image

from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.extensions.evaluation.exported import write_texts
from torchmm.extensions.evaluation.text.opened import Export
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.training_section import TrainingConfig

SEQUENCE_LENGTH = 8192
MAX_NEW_TOKENS = 128
"""Where a task does not say."""


class ExportModel(lmms):
    """An export as lmms-eval sees a model.

    Args:
        batch_size: questions that are answered together.
    """

    is_simple = True

    def __init__(self, export: Export, batch_size: int) -> None:
        super().__init__()
        self._export, self._batch_size = export, batch_size

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Greedy answers, each up to the first of its task's `until`."""
        answers: list[str] = [""] * len(requests)
        lengths = [_length(request.args[1]) for request in requests]
        for length in dict.fromkeys(lengths):
            places = [place for place, own in enumerate(lengths) if own == length]
            written = self._answer([requests[place] for place in places], length)
            for place, text in zip(places, written, strict=True):
                answers[place] = _until(text, requests[place].args[1].get("until", ()))
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Not there."""
        raise ConfigError("tasks that compare likelihoods cannot be answered; name one that writes")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not there."""
        raise ConfigError("tasks of several rounds cannot be answered; name another")

    def _answer(self, requests: Sequence[Any], length: int) -> list[str]:
        with tempfile.TemporaryDirectory() as scratch:
            records = [
                self._record(request, Path(scratch), number)
                for number, request in enumerate(requests)
            ]
            source = Path(scratch) / "questions.jsonl"
            source.write_text("".join(json.dumps(record) + "\n" for record in records))
            config = SourceConfig(path=str(source), scores=["exact_match"])
            data = DataConfig(validation=[config], index_cache=scratch)
            texts = write_texts(
                self._export,
                data,
                TrainingConfig(sequence_length=SEQUENCE_LENGTH),
                samples=len(records),
                max_new_tokens=length,
                batch_size=self._batch_size,
            )
        written = {text.index: text.generated for text in texts}
        if missing := [n for n in range(len(records)) if n not in written]:
            asked = records[missing[0]]["question"]
            raise ConfigError(f"{len(missing)} questions cannot be read, such as {asked[:80]!r}")
        return [written[number] for number in range(len(records))]

    def _record(self, request: Any, scratch: Path, number: int) -> dict[str, Any]:
        """A question with pictures in files."""
        context, _, visuals_of, doc_id, task, split = request.args
        names = []
        for count, visual in enumerate(visuals_of(self.task_dict[task][split][doc_id])):
            if not isinstance(visual, Image.Image):
                raise ConfigError(f"task {task} shows a {type(visual).__name__}, not a picture")
            names.append(f"{number}-{count}.png")
            visual.convert("RGB").save(scratch / names[-1])
        return {"images": names, "question": context, "answer": "?"}


def _length(settings: dict[str, Any]) -> int:
    return int(settings.get("max_new_tokens", MAX_NEW_TOKENS))


def _until(text: str, ends: str | Sequence[str]) -> str:
    given = [ends] if isinstance(ends, str) else ends
    for end in filter(None, given):
        text = text.split(end, maxsplit=1)[0]
    return text


def main() -> int:
    """Answers the tasks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("export", type=Path)
    add("--tasks", nargs="+", required=True)
    add("--include", help="directory of further tasks")
    add("--limit", type=int, help="questions of each task")
    add("--batch-size", type=int, default=8)
    add("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        model = ExportModel(Export.read(arguments.export), arguments.batch_size)
        found = simple_evaluate(
            model=model,
            tasks=arguments.tasks,
            task_manager=TaskManager("ERROR", include_path=arguments.include),
            limit=arguments.limit,
            batch_size=arguments.batch_size,
            log_samples=False,
            bootstrap_iters=0,
        )
    except TorchmmError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    scores = {
        f"{task}/{metric.partition(',')[0]}": value
        for task, of_task in found["results"].items()
        for metric, value in of_task.items()
        if isinstance(value, int | float) and "_stderr" not in metric
    }
    samples = {task: counts["effective"] for task, counts in found["n-samples"].items()}
    arguments.output.write_text(json.dumps({"scores": scores, "samples": samples}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
