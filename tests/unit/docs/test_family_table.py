"""scripts/family_table.py: what was proved becomes tables without empty columns."""

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "family_table.py"


def test_columns_that_say_nothing_are_left_out(tmp_path):
    proofs = [("llama", "equal", "5.9.0"), ("clip_vision_model", "flops", "5.10.1")]
    keys = ("model_type", "what", "transformers")
    files = []
    for number, proof in enumerate(proofs):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(json.dumps(dict(zip(keys, proof, strict=True))) + "\n")
    script = runpy.run_path(str(SCRIPT))
    lines = list(script["lines"](script["read"](files)))
    heads = [line for line in lines if "transformers |" in line or line.startswith("| Encoders")]
    assert heads[0] == "| LLMs | equal | exported as | transformers |"
    assert "| llama | yes | LlamaForCausalLM | 5.9.0 |" in lines
    assert heads[1] == "| Encoders | FLOPs |"
    assert "| clip_vision_model | yes |" in lines
    assert "| Composites | exported as |" in lines
