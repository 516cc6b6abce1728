"""New tokens: ids, initial rows, trained rows under adapters, and unsupported models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import needs_extension
from model_cases import COMPOSITES, LLMS, relative_error
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from torchmm.common.batch import IGNORE_TARGET, Microbatch, MicrobatchMeta
from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.data.media.text import TextEncoder
from torchmm.data.record_formats.sample import Sample, TextSegment
from torchmm.data.tokenizer import describe_untrained_tokens, load_tokenizer, read_new_tokens
from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.models.hf.adapter_files import save_adapters
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.layers.lora import adapted_linears
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.optim import frozen_token_rows

KNOWN = 64
"""Number of tokens of `tokenizer`."""
NEW = ["<loc_0>", "<loc_1>", "<loc_2>"]
ADAPTER = {"low": {"modules": ["llm"], "rank": 4, "alpha": 8.0}}


@pytest.fixture
def source(tmp_path, tokenizer):
    """Return a function that saves a model with the tokenizer of 64 words."""

    def save(family: str = "llama", rows: int = KNOWN) -> Path:
        torch.manual_seed(0)
        config = {**LLMS[family], "vocab_size": rows}
        directory = tmp_path / f"{family}-{rows}"
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    return save


def recipe_of(source: Path, new_tokens: list[str] | None = None, **sections: Any) -> Recipe:
    model = {
        "llm": {"source": str(source)},
        "new_tokens": NEW if new_tokens is None else new_tokens,
    }
    return Recipe.model_validate({"model": model, **sections})


def loaded(recipe: Recipe) -> MultimodalModel:
    model = recipe_model(recipe)
    materialize(model, "cpu")
    init_weights(model, 0, skip=load_weights(model))
    return model


def stored_weights(source: Path) -> tuple[Tensor, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()


def test_new_tokens_are_one_id(source):
    tokenizer = load_tokenizer(recipe_of(source()).model)
    ids = tokenizer.convert_tokens_to_ids(NEW)
    assert ids == [64, 65, 66]
    text = "w5 <loc_1> w6<loc_0><loc_2>w7"
    assert tokenizer(text, add_special_tokens=False).input_ids == [5, 65, 6, 64, 66, 7]
    # Text of users, and text of templates, which may contain special tokens.
    spec = loaded(recipe_of(source())).text_spec(tokenizer)
    encoder = TextEncoder(tokenizer, spec, 64)
    for is_template in (False, True):
        segment = TextSegment(text, loss=True, is_template=is_template)
        encoded = encoder.encode(Sample((segment,), add_bos=False, add_eos=False), [])
        assert encoded.ids == [5, 65, 6, 64, 66, 7]
    assert tokenizer.decode([5, 65], skip_special_tokens=True) == "w5 <loc_1>"


def test_image_placeholder_is_not_in_text(source):
    """Check a placeholder that the tokenizer lacks, which is special unlike other new tokens."""
    recipe = recipe_of(source(), ["<picture>", "<loc_0>"])
    model = recipe.model.model_copy(update={"image_token": "<picture>"})
    tokenizer = load_tokenizer(model)
    spec = loaded(recipe).text_spec(tokenizer)
    encoder = TextEncoder(tokenizer, spec, 64)
    segment = TextSegment("<picture> <loc_0>", loss=False, is_template=False)
    ids = encoder.encode(Sample((segment,), add_bos=False, add_eos=False), []).ids
    assert tokenizer.convert_tokens_to_ids("<picture>") == 64 not in ids
    assert 65 in ids


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma2"])
def test_new_rows_are_mean_of_known_rows(source, family):
    directory = source(family)
    model = loaded(recipe_of(directory)).llm
    assert model.text_config.vocab_size == 67
    for weight, stored in zip(
        (model.embedding.weight, model.head.weight), stored_weights(directory), strict=True
    ):
        assert weight.shape == (67, 32)
        assert torch.equal(weight[:64], stored)
        expected = stored.double().mean(0).float().expand(3, -1)
        torch.testing.assert_close(weight[64:].detach(), expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(weight[64], weight[66])
    assert (model.embedding.weight is model.head.weight) == (family != "llama")


def test_rows_within_padded_vocabulary_are_replaced(source):
    directory = source(rows=80)
    model = loaded(recipe_of(directory)).llm
    assert model.text_config.vocab_size == 80
    for weight, stored in zip(
        (model.embedding.weight, model.head.weight), stored_weights(directory), strict=True
    ):
        known = torch.tensor([row not in (64, 65, 66) for row in range(80)])
        assert torch.equal(weight[known], stored[known])
        expected = stored[:64].double().mean(0).float().expand(3, -1)
        torch.testing.assert_close(weight[~known].detach(), expected, rtol=1e-6, atol=1e-7)


def test_tokens_of_tokenizer_keep_rows(source):
    directory = source()
    tokens = read_new_tokens(recipe_of(directory, ["w9", "<loc_0>"]).model)
    assert tokens == ((9, 64), (64,), 64)
    weight = loaded(recipe_of(directory, ["w9", "<loc_0>"])).llm.embedding.weight
    assert torch.equal(weight[:64], stored_weights(directory)[0])


def test_tokens_that_are_not_one_id_are_rejected(tmp_path):
    words = Tokenizer(WordLevel({"big": 0, "dog": 1, "big dog": 2}, unk_token="big"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    section = {"llm": {"config": LLMS["llama"]}, "tokenizer": str(tmp_path)}
    recipe = Recipe.model_validate({"model": {**section, "new_tokens": ["dog", "big dog"]}})
    with pytest.raises(ConfigError, match=r"'big dog' has id 2 and is encoded as \[0, 1\]"):
        load_tokenizer(recipe.model)


def test_larger_tokenizer_is_rejected(source, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(source())
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "larger")
    recipe = recipe_of(source())
    model = recipe.model.model_copy(update={"tokenizer": str(tmp_path / "larger")})
    with pytest.raises(ConfigError, match="tokenizer has 65 tokens but the LLM has only 64"):
        recipe_model(recipe.model_copy(update={"model": model}))


def test_frozen_llm_is_rejected(source):
    with pytest.raises(ConfigError, match="the LLM is frozen; add adapters, or remove"):
        recipe_model(recipe_of(source(), freeze={"modules": ["llm"]}))


@needs_extension("extensions.auto_models")
def test_head_with_bias_is_rejected(source):
    phi = {**LLMS["llama"], "model_type": "phi", "num_key_value_heads": 4}
    model = {"llm": {"config": phi}, "tokenizer": str(source()), "new_tokens": NEW}
    recipe = Recipe.model_validate({"model": model})
    expected = r"model\.new_tokens: 'phi' is not supported, because backbone\.lm_head\.bias is not"
    with pytest.raises(ConfigError, match=expected):
        recipe_model(recipe)


def test_missing_rows_without_key_are_rejected(source):
    """Check that only `model.new_tokens` allows files with fewer rows."""
    section = {"llm": {"source": str(source()), "config": {"vocab_size": 67}}}
    model = recipe_model(Recipe.model_validate({"model": section}))
    materialize(model, "cpu")
    with pytest.raises(CheckpointError, match="has shape"):
        load_weights(model)


def test_repeated_tokens_are_rejected(source, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(
        f'[model]\nnew_tokens = ["<a>", "<a>", ""]\nllm.source = {json.dumps(str(source()))}\n'
        '[[data.sources]]\npath = "."\n'
    )
    with pytest.raises(ConfigError) as error:
        load_recipe(file, [], 1)
    text = str(error.value)
    assert "model.new_tokens: has '<a>' more than once" in text
    assert "model.new_tokens: has an empty token" in text


def microbatch_of(ids: list[int]) -> Microbatch:
    targets = [*ids[1:], IGNORE_TARGET]
    positions = torch.arange(len(ids))
    meta = MicrobatchMeta((), len(ids))
    return Microbatch(torch.tensor(ids), torch.tensor(targets), positions, [0, len(ids)], {}, meta)


IDS = [5, 65, 6, 64, 66, 7, 65]


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_trained_rows_equal_peft(source, family):
    """Compare one SGD step with PEFT, which trains the rows as separate parameters."""
    directory = source(family)
    recipe = recipe_of(directory, adapters=ADAPTER)
    model = loaded(recipe)
    llm = model.llm
    assert llm.trained_token_ids == (64, 65, 66)
    description = llm.describe()
    assert not description.trainable and description.token_rows_trainable
    batch = microbatch_of(IDS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(batch).backward()
    for parameter, is_frozen_V1 in frozen_token_rows(model):
        parameter.grad.masked_fill_(is_frozen_V1, 0.0)

    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    base.resize_token_embeddings(67, mean_resizing=False)
    with torch.no_grad():
        base.get_input_embeddings().weight.copy_(before["llm." + llm.token_weights[0]])
        base.lm_head.weight.copy_(llm.head.weight)
    rows = {"embed_tokens": [64, 65, 66]}
    if family == "llama":
        rows["lm_head"] = [64, 65, 66]
    targets = sorted({name.rpartition(".")[2] for name, _, _ in adapted_linears(llm)})
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=targets,
        trainable_token_indices=rows,
        task_type="CAUSAL_LM",
    )
    peft = get_peft_model(base, config)
    logits = peft(input_ids=batch.input_ids_T[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(
        logits, batch.targets_T, reduction="sum", ignore_index=IGNORE_TARGET
    )
    loss.backward()
    deltas = {n: p.grad for n, p in peft.named_parameters() if "trainable_tokens_delta" in n}
    assert len(deltas) == len(rows)
    for layer, weight in (("embed_tokens", llm.embedding.weight), ("lm_head", llm.head.weight)):
        if layer not in rows:
            continue
        (expected,) = [grad for name, grad in deltas.items() if layer in name]
        assert relative_error(weight.grad[64:], expected) < 1e-5
        assert weight.grad[:64].count_nonzero() == 0
    adapters = sum(p.numel() for n, p in model.named_parameters() if ".lora." in n)
    assert model.parameter_counts()["llm"][1] == adapters + 3 * 32 * len(rows)
    # Rows of other weights are frozen.
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    names = {f"llm.{name}" for name in llm.token_weights}
    assert {n for n in trained if ".lora." not in n} == names & before.keys()


def test_rows_of_full_training_are_all_trained(source):
    model = loaded(recipe_of(source()))
    assert model.llm.trained_token_ids == () and frozen_token_rows(model) == []
    assert model.llm.describe().trainable and not model.llm.describe().token_rows_trainable


def test_adapter_files_of_new_tokens_are_rejected(source, tmp_path):
    model = loaded(recipe_of(source(), adapters=ADAPTER))
    with pytest.raises(ConfigError, match=r"files of adapters do not contain the rows"):
        save_adapters(model, tmp_path / "adapters")


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_export_has_new_tokens(source, tmp_path, family):
    recipe = recipe_of(source(family))
    model, tokenizer = loaded(recipe), load_tokenizer(recipe.model)
    export_hf(model, tmp_path / "hf", tokenizer)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == 67
    again = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert again("w5 <loc_1>", add_special_tokens=False).input_ids == [5, 65]
    with torch.no_grad():
        logits = exported(torch.tensor([IDS])).logits[0]
        batch = microbatch_of(IDS)
        ours = model.llm.logits(batch, {}, torch.arange(len(IDS)))
    assert relative_error(ours, logits) < 1e-5
    # The export needs no key, and a second run may list the same tokens.
    for tokens in ([], NEW):
        weight = loaded(recipe_of(tmp_path / "hf", tokens)).llm.embedding.weight
        assert torch.equal(weight, model.llm.embedding.weight)


def test_warning_omits_new_tokens(source, tmp_path):
    recipe = recipe_of(source(), adapters=ADAPTER)
    model = recipe.model.model_copy(update={"tokenizer": str(tmp_path / "other")})
    AutoTokenizer.from_pretrained(source()).save_pretrained(tmp_path / "other")
    assert describe_untrained_tokens(model, load_tokenizer(model), trains_embeddings=False) == ""


@pytest.mark.parametrize("name", ["llava", "paligemma", "gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_multimodal_model_has_new_rows(tmp_path, tokenizer, name):
    """Check that transformers loads the export of a multimodal model, with its other rows."""
    config = COMPOSITES[name]
    kind = FAMILIES[config["model_type"]].kind
    torch.manual_seed(0)
    first = kind._from_config(AutoConfig.for_model(**config))
    first.save_pretrained(tmp_path / "first")
    tokenizer.save_pretrained(tmp_path / "first")
    section = {"source": str(tmp_path / "first"), "new_tokens": NEW}
    recipe = Recipe.model_validate({"model": section})
    model = loaded(recipe)
    export_hf(model, tmp_path / "hf", load_tokenizer(recipe.model))
    exported = kind.from_pretrained(tmp_path / "hf")
    assert exported.config.get_text_config().vocab_size == 67
    before, after = first.state_dict(), exported.state_dict()
    larger = [key for key, value in after.items() if value.shape != before[key].shape]
    assert larger, name
    for key, value in after.items():
        assert torch.equal(value[: len(before[key])], before[key]), key
        if key in larger:
            mean = before[key].double().mean(0).float().expand(3, -1)
            torch.testing.assert_close(value[64:], mean, rtol=1e-6, atol=1e-7)
