"""Checks of the recipe keys of producers."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_problems import problems_of

from torchmm.recipe.read import load_recipe

MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_attention_heads = 6
"""


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    """Return the file of a valid recipe."""
    (tmp_path / "train.jsonl").write_text("{}")
    file = tmp_path / "valid.toml"
    file.write_text(f'{MODEL}\n[[data.sources]]\npath = "{tmp_path}/train.jsonl"\n')
    return file


def one_problem(path: Path, *overrides: str, world_size: int) -> str:
    (problem,) = problems_of(path, *overrides, world_size=world_size)
    return problem


def test_producers_on_other_hosts_require_encryption(valid):
    local = '["127.0.0.1:7411", "localhost:7411", "[::1]:7411"]'
    load_recipe(valid, ["--data.producers.addresses", local], 1)
    remote = ["--data.producers.addresses", '["127.0.0.1:7411", "10.0.0.7:7411"]']
    problem = one_problem(valid, *remote, world_size=1)
    assert 'data.producers.addresses[1] = "10.0.0.7:7411"' in problem
    assert "set data.producers.ca_certificate" in problem
    problem = one_problem(valid, "--data.producers.registry", "10.0.0.7:7410", world_size=1)
    assert 'data.producers.registry = "10.0.0.7:7410"' in problem
    load_recipe(valid, [*remote, "--data.producers.ca_certificate", "ca.pem"], 1)


@pytest.mark.parametrize("address", ["here", "127.0.0.1", "127.0.0.1:0", "a:1\\nb", "http://a:1"])
def test_producer_address_without_port_is_rejected(valid, address):
    problem = one_problem(valid, "--data.producers.registry", address, world_size=1)
    assert "data.producers.registry" in problem and "use HOST:PORT" in problem
    addresses = f'["127.0.0.1:1", "{address}"]'
    problem = one_problem(valid, "--data.producers.addresses", addresses, world_size=1)
    assert "data.producers.addresses[1]" in problem and "use HOST:PORT" in problem


def test_producers_use_list_or_registry(valid):
    both = ("addresses", '["127.0.0.1:7411"]'), ("registry", "127.0.0.1:7410")
    overrides = [text for name, value in both for text in (f"--data.producers.{name}", value)]
    assert "remove one of the two keys" in one_problem(valid, *overrides, world_size=1)
    by_ray = ["--data.producers.engine", "ray"]
    assert "requires data.producers.registry" in one_problem(valid, *by_ray, world_size=1)
    by_ray += ["--data.producers.registry", "node1:7410", "--data.producers.ca_certificate", "ca"]
    by_ray += ["--data.producers.tls_certificate", "producer.pem"]
    problem = one_problem(valid, *by_ray, world_size=1)
    assert "data.producers.tls_key" in problem and "on another host" in problem


@pytest.mark.parametrize(("option", "missing"), [("certificate", "key"), ("key", "certificate")])
def test_producers_with_half_tls_pair_are_rejected(valid, option, missing):
    local = ["--data.producers.engine", "ray", "--data.producers.registry", "127.0.0.1:7410"]
    half = [*local, f"--data.producers.tls_{option}", "file.pem"]
    problem = one_problem(valid, *half, world_size=1)
    assert f"data.producers.tls_{missing}" in problem
    assert f"is required with data.producers.tls_{option}" in problem
    load_recipe(valid, local, 1)
    load_recipe(valid, [*half, f"--data.producers.tls_{missing}", "other.pem"], 1)


@pytest.mark.parametrize(
    ("upload", "fix"),
    [
        ("memory://bucket/runs", "use a bucket or a directory"),
        ("file://host/runs", "use a path, or file:///PATH"),
        ("file:/runs", "use file://... or a path"),
        ("s3:/bucket/runs", "use s3://... or a path"),
        ("~nobody-has-this-name/runs", "use an absolute path"),
    ],
)
def test_upload_to_unusable_url_is_rejected(valid, upload, fix):
    problem = one_problem(valid, "--checkpoint.remote_dir", upload, world_size=1)
    assert "checkpoint.remote_dir" in problem and upload in problem and fix in problem


def test_staging_at_url_is_rejected(valid):
    options = ["--checkpoint.remote_dir", "/copies", "--checkpoint.staging_dir", "s3://bucket/runs"]
    assert "use a directory" in one_problem(valid, *options, world_size=1)


def test_producers_that_plan_reject_epochs(valid):
    planned = ["--data.producers.plan", "true", "--data.producers.addresses", '["localhost:7411"]']
    problem = one_problem(valid, "--training.epochs", "1", *planned, world_size=1)
    assert "only the producers read the sources and count samples" in problem
