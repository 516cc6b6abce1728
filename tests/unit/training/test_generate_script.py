"""scripts/generate.py reads both kinds of export."""

from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoTokenizer

from torchmm.models.hf.export import PARTS_FILE, export_hf
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.models.registry import build_model
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

SCRIPT = Path(__file__).parents[3] / "scripts" / "generate.py"


def _config(connector: str) -> ModelConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    llm = {"model_type": "llama", "vocab_size": 4096, "num_attention_heads": 2, **sizes}
    vision = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, **sizes}
    encoder = {"config": {**vision, "num_attention_heads": 2}, "connector": connector}
    return ModelConfig.model_validate({"llm": {"config": llm}, "encoders": {"vision": encoder}})


@pytest.mark.parametrize("connector", ["mlp", "pixel_shuffle_mlp"])
def test_writes_a_line_per_image(connector, tmp_path, real_data, train_server):
    model = build_model(_config(connector), FreezeConfig())
    materialize(model, "cpu")
    init_weights(model, seed=0)
    export_hf(model, tmp_path / "hf", AutoTokenizer.from_pretrained(real_data / "tokenizer"))
    assert (tmp_path / "hf" / PARTS_FILE).exists() == (connector == "pixel_shuffle_mlp")
    pictures = [tmp_path / "red.png", tmp_path / "blue.jpg"]
    for picture in pictures:
        Image.new("RGB", (40, 30), picture.stem).save(picture)
    arguments = [tmp_path / "hf", *pictures, "--max-new-tokens", "3"]
    codes, output = train_server.run(arguments, tmp_path / "log", script=SCRIPT)
    assert codes == [0], output
    lines = [line for line in output.splitlines() if line.startswith(str(tmp_path))]
    assert [line.split(":")[0] for line in lines] == [str(p) for p in pictures]
