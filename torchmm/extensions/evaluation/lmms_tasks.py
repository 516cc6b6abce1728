r"""Evaluate an export on lmms-eval tasks.

`benchmarks.py` starts this program with the Python of `scripts/lmms_eval.sh`.

    .lmms-eval/bin/python -m torchmm.extensions.evaluation.lmms_tasks outputs/mine/hf \
        --tasks mmmu_val --output scores.json

Questions are a source of question records, so that prompts have the chat template and pixels of
training. `generate_held_out_text` generates the responses. The lmms-eval class for Hugging Face
models is not used, because it passes arguments that processors of transformers 5 reject, and always
computes in bfloat16.
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
from torchmm.extensions.evaluation.hf_generation import generate_held_out_text
from torchmm.extensions.evaluation.text.load_model import ExportedModel
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.training_section import TrainingConfig

SEQUENCE_LENGTH = 8192
MAX_NEW_TOKENS = 128
"""Default of tasks without a maximum length."""


class ExportModel(lmms):
    """Model interface of lmms-eval for an export.

    Args:
        export: Export to evaluate.
        batch_size: Number of questions in one batch.
    """

    is_simple = True

    def __init__(self, export: ExportedModel, batch_size: int) -> None:
        super().__init__()
        self._export, self._batch_size = export, batch_size

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy responses, each up to the first of the `until` strings of its task."""
        texts = [""] * len(requests)
        lengths = [int(r.args[1].get("max_new_tokens", MAX_NEW_TOKENS)) for r in requests]
        for length in dict.fromkeys(lengths):
            numbers = [
                number for number, request_length in enumerate(lengths) if request_length == length
            ]
            written = self._generate([requests[number] for number in numbers], length)
            for number, full_text in zip(numbers, written, strict=True):
                until = requests[number].args[1].get("until", ())
                text = full_text
                for stop_text in filter(None, [until] if isinstance(until, str) else until):
                    text = text.split(stop_text, maxsplit=1)[0]
                texts[number] = text
        return texts

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Raise an error, because tasks that compare likelihoods are not supported."""
        raise ConfigError(
            "tasks that compare likelihoods are not supported; use a task that generates text"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Raise an error, because tasks with several rounds are not supported."""
        raise ConfigError("tasks with several rounds are not supported; use another task")

    def _generate(self, requests: Sequence[Any], length: int) -> list[str]:
        """Return the responses to requests with the same maximum length."""
        with tempfile.TemporaryDirectory() as scratch:
            records = [
                self._record(request, Path(scratch), number)
                for number, request in enumerate(requests)
            ]
            source = Path(scratch) / "questions.jsonl"
            source.write_text("".join(json.dumps(record) + "\n" for record in records))
            config = SourceConfig(path=str(source), metrics=["exact_match"])
            texts = generate_held_out_text(
                self._export,
                DataConfig(validation=[config], index_cache_dir=scratch),
                TrainingConfig(sequence_length=SEQUENCE_LENGTH),
                samples=len(records),
                max_new_tokens=length,
                batch_size=self._batch_size,
            )
        written = {text.index: text.generated for text in texts}
        if missing := [n for n in range(len(records)) if n not in written]:
            asked = records[missing[0]]["question"]
            raise ConfigError(f"{len(missing)} samples cannot be read, such as {asked[:80]!r}")
        return [written[number] for number in range(len(records))]

    def _record(self, request: Any, scratch: Path, number: int) -> dict[str, Any]:
        """Return a question record and write its images to files."""
        context, _, visuals_of, doc_id, task, split = request.args
        names = []
        for count, visual in enumerate(visuals_of(self.task_dict[task][split][doc_id])):
            if not isinstance(visual, Image.Image):
                raise ConfigError(
                    f"task {task} contains a {type(visual).__name__}, but only images are supported"
                )
            names.append(f"{number}-{count}.png")
            visual.convert("RGB").save(scratch / names[-1])
        return {"images": names, "question": context, "answer": "?"}


def main() -> int:
    """Evaluate the tasks of the command line, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("export", type=Path)
    add("--tasks", nargs="+", required=True)
    add("--include", help="directory with additional tasks")
    add("--limit", type=int, help="number of samples per task")
    add("--batch-size", type=int, default=8)
    add("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        model = ExportModel(ExportedModel.read(arguments.export), arguments.batch_size)
        results = simple_evaluate(
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
        for task, of_task in results["results"].items()
        for metric, value in of_task.items()
        if isinstance(value, int | float) and "_stderr" not in metric
    }
    samples = {task: counts["effective"] for task, counts in results["n-samples"].items()}
    arguments.output.write_text(json.dumps({"scores": scores, "samples": samples}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
