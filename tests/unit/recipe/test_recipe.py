"""Tests of recipes: inheritance, overrides, and reports of all mistakes with file and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import needs_extension
from recipe_problems import problems_of

from torchmm.common.errors import ConfigError
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe import check, check_parallel, training_section
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import check_recipe, dump_recipe, load_recipe, resolve_sizes
from torchmm.recipe.recipe import Recipe
from torchmm.training.model_build import build_meta_model

MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_attention_heads = 6
[model.encoders.vision.config]
model_type = "siglip_vision_model"
"""


@pytest.fixture
def write(tmp_path: Path):
    def _write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return _write


@pytest.fixture
def valid(write, tmp_path: Path) -> Path:
    write("train.jsonl", "{}")
    return write("valid.toml", f'{MODEL}\n[[data.sources]]\npath = "{tmp_path}/train.jsonl"\n')


def one_problem(path: Path, *overrides: str, world_size: int | None = None) -> str:
    problems = problems_of(path, *overrides, world_size=world_size)
    assert len(problems) == 1, problems
    return problems[0]


def test_all_mistakes_are_reported_at_once(write, tmp_path):
    base = write("base.toml", '[optimizer]\nlr_schedule = "cosin"\n[trainin]\nsteps = 5\n')
    child = write(
        "child.toml",
        'base = "base.toml"\n' + MODEL + "[training]\nsteps = 'ten'\nglobal_batch_sise = 4\n"
        '[freeze]\nmodules = ["visoin"]\n[[data.sources]]\npath = "absent/x.parquet"\n',
    )
    problems = problems_of(child, "--parallel.tensor", "0", world_size=1)
    expected = [
        (base, "optimizer.lr_schedule", "cosine"),
        (base, "trainin", "training"),
        (child, "training.steps", "integer"),
        (child, "training.global_batch_sise", "training.global_batch_size"),
        (child, "freeze.modules", '"vision"'),
        (child, "data.sources[0].path", "prepare-data"),
        ("command line", "parallel.tensor", ">= 1"),
    ]
    assert len(problems) == len(expected), problems
    for origin, key, fix in expected:
        line = next(p for p in problems if p.startswith(f"{origin}: {key}") and fix in p)
        assert line.count("\n") == 0


def test_consequences_of_a_mistake_are_not_reported(write):
    path = write("r.toml", '[model.lm]\nsource = "x/y"\n[[data.sources]]\npath = "."\n')
    assert "did you mean model.llm?" in one_problem(path, world_size=1)


def test_bases_merge_tables_and_replace_lists(write, tmp_path):
    (tmp_path / "bases").mkdir()
    write("bases/a.toml", "[training]\nsteps = 1\nseed = 1\n[optimizer]\nbetas = [0.1, 0.2]\n")
    write("bases/b.toml", 'base = "a.toml"\n[training]\nsteps = 2\n')
    child = write("c.toml", 'base = "bases/b.toml"\n[optimizer]\nbetas = [0.5, 0.6]\n')
    loaded = load_recipe(child)
    assert loaded.recipe.training.steps == 2
    assert loaded.recipe.training.seed == 1
    assert loaded.recipe.optimizer.betas == [0.5, 0.6]
    assert loaded.origins["training.seed"] == str(tmp_path / "bases" / "a.toml")
    assert loaded.origins["optimizer.betas"] == str(child)


def test_circular_bases_are_rejected(write):
    write("a.toml", 'base = "b.toml"\n')
    assert "circular base" in one_problem(write("b.toml", 'base = "a.toml"\n'))


def test_missing_base_names_the_recipe(write, tmp_path):
    path = write("a.toml", 'base = "gone.toml"\n')
    problem = one_problem(path)
    assert str(tmp_path / "gone.toml") in problem
    assert f"base of {path}" in problem


def test_duplicate_key_is_reported_with_line(write):
    problem = one_problem(write("a.toml", "[training]\nsteps = 1\nsteps = 2\n"))
    assert "a.toml" in problem
    assert "line 3" in problem


@pytest.mark.parametrize(
    ("arguments", "read", "expected"),
    [
        (["--training.steps", "7"], lambda r: r.training.steps, 7),
        (["--parallel.shard=-1"], lambda r: r.parallel.shard, -1),
        (["--parallel.replicate", "-1"], lambda r: r.parallel.replicate, -1),
        (["--optimizer.betas", "[0.1, 0.3]"], lambda r: r.optimizer.betas, [0.1, 0.3]),
        (["--training.deterministic=true"], lambda r: r.training.deterministic, True),
        (["--name", "123"], lambda r: r.name, "123"),
        (["--name=my-run"], lambda r: r.name, "my-run"),
        (["--training.dtype", "bfloat16"], lambda r: r.training.dtype, "bfloat16"),
        (["--training.steps", "7", "--training.steps", "8"], lambda r: r.training.steps, 8),
        (
            ["--optimizer.module_lr.vision.connector", "0.5"],
            lambda r: r.optimizer.module_lr,
            {"vision.connector": 0.5},
        ),
        (
            ["--model.llm.config.hidden_size", "64"],
            lambda r: r.model.llm.config["hidden_size"],
            64,
        ),
        (
            ["--data.sources", '[{path = "a", weight = 2}]'],
            lambda r: (r.data.sources[0].path, r.data.sources[0].weight),
            ("a", 2.0),
        ),
        (["--freeze", '{modules = ["llm"]}'], lambda r: r.freeze.modules, ["llm"]),
    ],
)
def test_overrides_change_values(valid, arguments, read, expected):
    assert read(load_recipe(valid, arguments).recipe) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--training.stps", "7"], "command line: training.stps = 7: unknown key; did you mean"),
        (["--training.steps"], "command line: training.steps: has no value"),
        (["training.steps=7"], "command line: training.steps=7: is not an override"),
        (["--training.steps", "x"], 'command line: training.steps = "x": must be an integer'),
        (["--steps", "7"], "command line: steps = 7: unknown key; did you mean training.steps?"),
        (["--training.steps", "1\nseed = 3"], "must be an integer"),
        (["--freeze.modules", '"llm"'], 'freeze.modules = "llm": must be a list such as ["llm"]'),
        (["--data.sources", '"a"'], "must be a list of tables; write each as [[data.sources]]"),
        (["--optimizer.betas", "0.9"], "optimizer.betas = 0.9: must be a list such as [1, 2]"),
    ],
)
def test_invalid_overrides_name_the_command_line(valid, arguments, expected):
    assert expected in one_problem(valid, *arguments)


def test_resolved_recipe_loads_back_equal(valid, write):
    recipe = load_recipe(valid, ["--optimizer.module_lr.vision.connector", "0.1"]).recipe
    again = write("again.toml", dump_recipe(recipe))
    assert load_recipe(again).recipe == recipe


def test_default_recipe_loads_back_equal(write):
    assert load_recipe(write("default.toml", dump_recipe(Recipe()))).recipe == Recipe()


@pytest.mark.parametrize("address", ["{}", "file://{}", "file://localhost{}"])
def test_resume_accepts_directory_as_address(valid, tmp_path, address):
    load_recipe(valid, ["--checkpoint.resume", address.format(tmp_path)], 1)
    missing = address.format(tmp_path / "missing")
    assert "is not a directory" in one_problem(valid, "--checkpoint.resume", missing, world_size=1)


def test_valid_recipe_has_no_problems(valid):
    assert check_recipe(load_recipe(valid, [], 2).recipe, 2) == []


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        ("--parallel.shard 3", "parallel", "replicate 1 x shard 3 x tensor 1 is not equal to 4"),
        ("--parallel.replicate -1", "parallel", "only one key may be -1"),
        ("--parallel.shard 0", "parallel", "use 1"),
        ("--training.global_batch_size 6", "training.global_batch_size", "use 4 or 8"),
        ("--training.global_batch_size 1", "training.global_batch_size", "use 4"),
        ("--parallel.tensor 4", "model.llm.config.num_attention_heads = 6", "parallel.tensor"),
        ("--optimizer.warmup_steps 101", "optimizer.warmup_steps", "training.steps"),
        (
            "--optimizer.lr_schedule wsd --optimizer.warmup_steps 90",
            "optimizer.warmup_steps",
            "use at most 80",
        ),
        ("--optimizer.betas [0.9,1.0]", "optimizer.betas", "< 1"),
        ("--optimizer.stochastic_rounding=false", "optimizer.stochastic_rounding", "no effect"),
        ("--optimizer.module_lr.lm 1", "optimizer.module_lr", 'did you mean "llm"'),
        ("--compile.modules ['vison']", "compile.modules", 'did you mean "vision"'),
        (
            "--activation_checkpoint.modules.audio full",
            "activation_checkpoint.modules",
            "use one of: llm, vision, vision.connector",
        ),
        (
            "--activation_checkpoint.memory_limit 90",
            "activation_checkpoint.memory_limit",
            'fraction of the device memory ("85%")',
        ),
        (
            "--freeze.modules ['llm','vision','vision.connector']",
            "freeze.modules",
            "no module to train",
        ),
        (
            "--freeze.modules ['llm'] --optimizer.module_lr.llm 1",
            "optimizer.module_lr.llm",
            "frozen",
        ),
        ("--adapters.a.modules ['lm']", "adapters.a.modules", 'did you mean "llm"'),
        (
            "--adapters.a.modules ['vision.connector']",
            "adapters.a.modules",
            "a connector between separate checkpoints is trained without adapters",
        ),
        (
            "--adapters.a.modules ['llm'] --adapters.a.source ./gone",
            "adapters.a.source",
            "no such directory",
        ),
        ("--validation.num_samples 2", "validation.num_samples", "[[data.validation]]"),
        ("--data.sources []", "data.sources", "[[data.sources]]"),
        (
            "--training.epochs 1 --data.sources [{path='.',streaming=true}]",
            "training.epochs",
            "set training.steps, or data.sources[0].streaming = false",
        ),
        (
            "--training.epochs 1 --data.sources [{path='.',name='a'}] "
            "--data.mixture_schedule [{weights={a=1.0}}]",
            "training.epochs",
            "set training.steps",
        ),
        ("--model.source x/y", "model", "use one of the two forms"),
        ("--model.encoders.audio {}", "model.encoders.audio", "neither source nor config"),
        ("--model.encoders.llm.source x/y", "model.encoders.llm", "is not a valid"),
        ("--model.llm.source ./gone", "model.llm.source", "no such directory"),
        ("--checkpoint.resume gone", "checkpoint.resume", '"auto"'),
        ("--checkpoint.keep_best {}", "checkpoint.keep_best", "set validation.interval"),
        (
            "--checkpoint.keep_best {} --validation.interval 2",
            "checkpoint.keep_best",
            "[[data.validation]]",
        ),
        (
            "--checkpoint.keep_best {metric='word_error_rate'} --validation.interval 2 "
            "--data.validation [{path='.'}]",
            "checkpoint.keep_best",
            "set validation.num_samples",
        ),
        (
            "--checkpoint.keep_best {} --validation.interval 2 --checkpoint.interval 3 "
            "--data.validation [{path='.'}]",
            "checkpoint.keep_best",
            "make checkpoint.interval a multiple",
        ),
        (
            "--checkpoint.keep_best {metric='held/cider'} --validation.interval 2 "
            "--data.validation [{path='.',name='held',metrics=['exact_match']}]",
            "checkpoint.keep_best",
            "use one of: validation_loss, validation_loss_text, validation_loss_image, "
            "word_error_rate, loss, held/exact_match",
        ),
        (
            "--checkpoint.keep_best {metric='held/cider'} --validation.interval 2 "
            "--data.validation [{path='.',name='held',metrics=['cider']}]",
            "checkpoint.keep_best",
            "set validation.num_samples",
        ),
        (
            "--data.sources [{path='.',metrics=['cider']}]",
            "data.sources[0].metrics",
            "[[data.validation]]",
        ),
        ("--validation.ema true", "validation.ema", "set training.ema_decay"),
        (
            "--validation.early_stopping_patience 2 --validation.interval 0",
            "validation.early_stopping_patience",
            "set validation.interval",
        ),
        (
            "--validation.early_stopping_patience 2 --validation.interval 2 --data.validation []",
            "validation.early_stopping_patience",
            "[[data.validation]]",
        ),
        ("--metrics.profile_step 101", "metrics.profile_step", "earlier"),
        ("--name a/b", "name", "directory name"),
        ("--training.device cpu --parallel.backend nccl", "parallel.backend", "auto"),
        (
            "--parallel.sequence_parallel true --parallel.tensor 2 --training.sequence_length 9",
            "training.sequence_length",
            "multiple",
        ),
    ],
)
def test_value_checks_name_key_and_fix(valid, arguments, key, text):
    problem = one_problem(valid, *arguments.split(), world_size=4)
    assert f": {key}" in problem
    assert text in problem


@pytest.mark.parametrize(
    ("arguments", "key", "extension"),
    [
        ("--optimizer.state_dtype int8", "optimizer.state_dtype", "low_precision"),
        ("--optimizer.offload true", "optimizer.offload", "low_precision"),
        ("--training.loss preference", "training.loss", "preferences"),
        (
            "--training.dtype bfloat16 --training.parameter_dtype bfloat16",
            "training.parameter_dtype",
            "low_precision",
        ),
        (
            "--parallel.tensor 2 --parallel.sequence_parallel true "
            "--parallel.async_tensor_parallel true",
            "parallel.async_tensor_parallel",
            "async_tp",
        ),
    ],
)
def test_keys_of_missing_extensions_are_rejected(valid, monkeypatch, arguments, key, extension):
    for module in (check, check_parallel, training_section):
        monkeypatch.setattr(module, "find_entries", lambda table: ())
    monkeypatch.setattr(check, "find_entry", lambda table, name: None)
    problem = one_problem(valid, *arguments.split(), world_size=4)
    assert f": {key}" in problem
    assert f'the extension "{extension}" is not installed' in problem


A, B = '{path = ".", name = "a"', '{path = ".", name = "b"'


@pytest.mark.parametrize(
    ("sources", "stages", "key", "text"),
    [
        (
            [A + ", epochs = 2.0, weight = 2.0}"],
            "",
            "data.sources[0].epochs",
            "combined with weight = 2.0",
        ),
        ([A + ", epochs = 2.0, streaming = true}"], "", "data.sources[0].epochs", "set weight ins"),
        ([A + ", epochs = 2.0}", B + "}"], "", "data.sources[1].epochs", "other sources set"),
        (
            [A + ", filter = {min_tokens = 9, max_tokens = 8}}"],
            "",
            "data.sources[0].filter.min_tokens",
            "max_tokens = 8",
        ),
        (
            [A + "}"],
            "{until_step = 2, weights = {a = 1.0}}",
            "data.mixture_schedule[0].until_step",
            "last",
        ),
        (
            [A + "}"],
            "{weights = {a = 1.0}}, {weights = {a = 1.0}}",
            "data.mixture_schedule[0].until_step",
            "must be above 0",
        ),
        (
            [A + "}"],
            "{weights = {a = 1.0, aa = 1.0}}",
            "data.mixture_schedule[0].weights.aa",
            '"a"?',
        ),
        ([A + "}"], "{weights = {a = -1.0}}", "data.mixture_schedule[0].weights", "above 0"),
        (
            [A + "}", B + "}"],
            "{weights = {a = 1.0}}",
            "data.mixture_schedule",
            'uses the source "b"',
        ),
        ([A + ", weight = 2.0}"], "{weights = {a = 1.0}}", "data.sources[0].weight", "no effect"),
    ],
)
def test_source_weights_are_checked(valid, sources, stages, key, text):
    overrides = [f"--data.sources=[{', '.join(sources)}]", f"--data.mixture_schedule=[{stages}]"]
    problems = problems_of(valid, *overrides, world_size=1)
    assert any(f": {key}" in p and text in p for p in problems), problems


def test_composite_has_modules_for_freezing(write):
    names = '["vision", "vision.connector"]'
    path = write(
        "r.toml",
        f'[model]\nsource = "a/b"\n[freeze]\nmodules = {names}\n[[data.sources]]\npath = "."\n',
    )
    load_recipe(path, [], 1)


def test_ranks_can_share_a_key_value_head(valid):
    arguments = ["--parallel.tensor", "6", "--model.llm.config.num_key_value_heads"]
    load_recipe(valid, [*arguments, "2"], 6)
    assert "num_key_value_heads = 4" in one_problem(valid, *arguments, "4", world_size=6)


def test_model_without_source_requires_tokenizer(write):
    text = '[model.llm.config]\nmodel_type = "llama"\n[[data.sources]]\npath = "."\n'
    assert "model.tokenizer" in one_problem(write("r.toml", text), world_size=1)


def test_unquoted_name_with_dot_gets_a_hint(valid):
    valid.write_text(valid.read_text() + "[optimizer.module_lr]\nvision.connector = 1e-4\n")
    assert "needs quotes" in one_problem(valid)


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [
        ({}, 8, (1, 1, 8, 1)),
        ({"tensor": 2}, 8, (1, 1, 4, 2)),
        ({"replicate": -1, "shard": 2, "tensor": 2}, 8, (1, 2, 2, 2)),
        ({"replicate": 2, "shard": 2}, 4, (1, 2, 2, 1)),
        ({"pipeline": 2, "tensor": 2}, 8, (2, 1, 2, 2)),
    ],
)
def test_open_parallelism_degrees_are_resolved(sizes, world_size, expected):
    assert resolve_sizes(ParallelConfig(**sizes), world_size) == expected


SIMULATION = """
[simulation.images.vision]
patches = 16
tokens = 4
[[simulation.sequences]]
images = [0, 3]
"""


@needs_extension("balance")
def test_simulation_replaces_data_and_tokenizer(write):
    path = write("r.toml", MODEL.replace('tokenizer = "gpt2"', "") + SIMULATION)
    recipe = load_recipe(path, [], 1).recipe
    with pytest.raises(ConfigError, match="only describes a simulation") as error:
        build_meta_model(resolve_recipe(recipe, 1))
    assert any("tokenizer" in problem for problem in error.value.problems)


@needs_extension("balance")
@pytest.mark.parametrize(
    ("before", "after", "key", "text"),
    [
        ("images.vision", "images.visoin", "simulation.images.visoin", 'did you mean "vision"'),
        ("[0, 3]", "[3, 0]", "simulation.sequences[0].images", "[minimum, maximum]"),
        ("[0, 3]", "[0, 300]", "simulation.sequences[0].images", "1200 tokens, more than the 1024"),
        ("[[sim", "[simulation.generated]\nrows = 2\ncolumns = 2\n[[sim", "generated", "no gene"),
    ],
)
def test_invalid_simulation_statistics_are_reported(write, before, after, key, text):
    problem = one_problem(write("r.toml", MODEL + SIMULATION.replace(before, after)), world_size=1)
    assert key in problem and text in problem


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f'model.tokenizer = "{"a" * 300}"', "model.tokenizer"),
        (f'checkpoint.resume = "x/{"é" * 200}/y"', "checkpoint.resume"),
        ('output_dir = "a\\u0000b"', "output_dir"),
        (f'data.sources = [{{path = "{"a" * 300}"}}]', "data.sources[0].path"),
    ],
)
def test_name_that_no_file_can_have_is_rejected(tmp_path, line, key):
    file = tmp_path / "r.toml"
    file.write_text(line)
    problems = problems_of(file, world_size=1)
    assert any(f"{key} = " in p and "255 bytes or a null character" in p for p in problems)


@pytest.mark.parametrize("value", ["[]", "7", '"x"'])
def test_encoder_that_is_no_table_is_rejected(tmp_path, value):
    file = tmp_path / "r.toml"
    file.write_text(f"model.encoders.vision = {value}")
    assert any("model.encoders.vision" in p and "must be a table" in p for p in problems_of(file))


def test_epochs_replace_steps_of_base(write, valid):
    base = write("base.toml", "[training]\nsteps = 500\n")
    child = write("child.toml", 'base = "base.toml"\n[training]\nepochs = 2.5\n')
    recipe = load_recipe(child).recipe
    assert recipe.training.epochs == 2.5
    dumped = write("dumped.toml", dump_recipe(recipe))
    assert load_recipe(dumped).recipe == recipe, "the dumped recipe has steps"
    again = load_recipe(child, ["--training.steps", "7"]).recipe.training
    assert (again.steps, again.epochs) == (7, None)
    problem = one_problem(base, "--training.epochs", "1", "--training.steps", "7")
    assert "both set" in problem


def test_warmup_is_checked_only_if_steps_are_known(valid):
    assert one_problem(valid, "--optimizer.warmup_steps", "200", world_size=1)
    load_recipe(valid, ["--optimizer.warmup_steps=200", "--training.epochs=1"], 1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--data.sources=[{path='s3://a/b'}]"], 'data.sources[0].path = "s3://a/b"'),
        (["--data.sources=[{path='a.lance'}]"], 'data.sources[0].path = "a.lance"'),
        (["--data.sources=[{path='.',format='energon'}]"], 'data.sources[0].format = "energon"'),
        (["--data.producers.addresses=['[::1]:1']"], 'data.producers.addresses = ["[::1]:1"]'),
        (["--data.producers.registry=127.0.0.1:1"], 'data.producers.registry = "127.0.0.1:1"'),
        (["--checkpoint.remote_dir=/copies"], 'checkpoint.remote_dir = "/copies"'),
        (["--checkpoint.resume=s3://a/b"], 'checkpoint.resume = "s3://a/b"'),
    ],
)
def test_missing_extension_is_named(valid, monkeypatch, overrides, expected):
    monkeypatch.setattr("torchmm.recipe.check.find_entry", lambda table, name: None)
    extension = "formats" if "lance" in expected or "energon" in expected else "remote"
    message = f'{expected}: the extension "{extension}" is not installed'
    assert any(message in text for text in problems_of(valid, *overrides, world_size=1))
