"""Checkpoints of one process: restored state, mismatches, and retention."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from checkpoint_damage import rewrite
from checkpoint_runs import (
    Model,
    build,
    everything,
    same,
    saved,
    snapshot,
    steps,
    train,
)
from safetensors.torch import load_file
from torch import nn

from torchmm.common.errors import CheckpointError, PeerError
from torchmm.common.rng import restore_rng
from torchmm.training.checkpoint import load
from torchmm.training.checkpoint import manager as checkpoint
from torchmm.training.checkpoint.load import PACKAGES
from torchmm.training.checkpoint.manager import CheckpointManager
from torchmm.training.checkpoint.manifest import find_problems, list_steps, read_manifest


@pytest.mark.parametrize("package", ["torch", *PACKAGES])
def test_resume_with_different_version_is_logged(manager, tmp_path, caplog, package):
    first = manager()
    saved(first, 1)
    path = tmp_path / "checkpoints/step-1"
    assert first.resume(*build()).step == 1 and "different package versions" not in caplog.text
    versions = read_manifest(path)["versions"]
    now = versions.get(package) or str(torch.__version__)
    facts = {"versions": {**versions, package: "0.1"}} if package != "torch" else {"torch": "0.1"}
    rewrite(path, **facts)
    assert first.resume(*build()).step == 1
    assert f"different package versions ({package} 0.1 -> {now})" in caplog.text


@pytest.mark.parametrize("saved_kernel", ["flash", None])
def test_resume_with_different_kernel_is_logged(
    manager, tmp_path, caplog, monkeypatch, saved_kernel
):
    first = manager()
    saved(first, 1)
    path = tmp_path / "checkpoints/step-1"
    versions = read_manifest(path)["versions"]
    if saved_kernel:
        rewrite(path, versions={**versions, load.IMAGE_KERNELS: saved_kernel})
    now = {**versions, load.IMAGE_KERNELS: "cuDNN for heads of 72"}
    monkeypatch.setattr(load, "installed_versions", lambda: now)
    first.resume(*build())
    changed = "attention of images flash -> cuDNN for heads of 72"
    assert (changed in caplog.text) == bool(saved_kernel)
    assert ("different package versions" in caplog.text) == bool(saved_kernel)


def test_resume_without_package_is_logged(manager, tmp_path, caplog, monkeypatch):
    first = manager()
    saved(first, 1)
    monkeypatch.setattr(load, "installed_versions", dict)
    first.resume(*build())
    assert f"pillow {version('pillow')} -> not installed" in caplog.text


@pytest.mark.parametrize("data", [{"content": {"settings": {"transformers": "5.1"}}}, {}, [], None])
def test_resume_of_older_checkpoint_compares_known_versions(manager, tmp_path, caplog, data):
    first = manager()
    first.save(1, *build(), {"data": data})
    rewrite(tmp_path / "checkpoints/step-1", versions=None)
    first.resume(*build())
    assert caplog.text.count("transformers 5.1 -> ") == bool(data)
    assert ("different package versions" in caplog.text) == bool(data)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_checkpoint_restores_state_bitwise(manager, asynchronous, fused):
    first = manager(async_save=asynchronous)
    model, optimizer = build(fused=fused)
    train(model, optimizer)
    first.save(1, model, optimizer, {"position": [1, "a"]})
    first.wait()
    other, other_optimizer = build(seed=1, fused=fused)
    restored = first.resume(other, other_optimizer)
    assert (restored.step, restored.state) == (1, {"position": [1, "a"]})
    for _ in range(2):
        assert same(everything(model, optimizer), everything(other, other_optimizer))
        train(model, optimizer)
        train(other, other_optimizer)


def test_checkpoint_before_first_step_has_no_optimizer_state(manager):
    first = manager()
    model, optimizer = build()
    first.save(0, model, optimizer, {})
    train(model, optimizer)
    first.resume(model, optimizer)
    assert not optimizer.state
    assert same(model.state_dict(), build()[0].state_dict())


def test_saving_changes_no_state(manager):
    model, optimizer = build()
    before = snapshot(model, optimizer)
    manager().save(0, model, optimizer, {})
    assert same(before, everything(model, optimizer))


def test_rng_state_is_restored(manager):
    first = manager()
    torch.manual_seed(5)
    first.save(1, *build(), {})
    expected = torch.rand(4)
    torch.rand(9)
    restored = first.resume(*build())
    restore_rng(restored.rng)
    assert torch.equal(torch.rand(4), expected)


def delay_writes(monkeypatch):
    """Delay saves until the returned event is set, for at most 30 seconds."""
    gate = checkpoint.threading.Event()
    write = CheckpointManager._write
    monkeypatch.setattr(
        CheckpointManager, "_write", lambda *a, **k: (gate.wait(30), write(*a, **k))
    )
    return gate


def test_asynchronous_save_stores_values_of_call(manager, monkeypatch):
    """Delay the writer until the values have changed."""
    gate = delay_writes(monkeypatch)
    first = manager(async_save=True)
    model, optimizer = build()
    train(model, optimizer)
    at_call = snapshot(model, optimizer)
    first.save(1, model, optimizer, {})
    train(model, optimizer)
    with torch.no_grad():
        model.embed.weight.fill_(7)
    gate.set()
    first.wait()
    first.resume(model, optimizer)
    assert same(everything(model, optimizer), at_call)


@pytest.mark.parametrize("error", [ValueError, PeerError])
def test_errors_wait_for_running_saves(error, manager, monkeypatch, tmp_path):
    """Check that a run that fails finishes its save, unless a peer is lost."""
    gate = delay_writes(monkeypatch)
    first = manager(async_save=True)
    with pytest.raises(error), first:
        first.save(1, *build(), {})
        checkpoint.threading.Timer(0.2, gate.set).start()
        raise error("failed")
    assert steps(tmp_path) == (["step-1"] if error is ValueError else [])
    gate.set()
    first.wait()


def test_next_save_waits_for_previous_save(manager, tmp_path):
    first = manager(async_save=True, keep_latest=9)
    model, optimizer = build()
    for step in range(4):
        first.save(step, model, optimizer, {})
        assert len(steps(tmp_path)) >= step
    first.close()
    assert all(not find_problems(path) for path in list_steps(tmp_path / "checkpoints"))


@pytest.mark.parametrize(
    ("text", "expected"), [("Connection closed by peer", PeerError), ("shapes", RuntimeError)]
)
def test_failed_save_names_lost_ranks_only(manager, monkeypatch, text, expected):
    def fail(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr(checkpoint.dcp, "save", fail)
    with pytest.raises(expected, match=text) as raised:
        saved(manager(), 1)
    assert ("a rank was lost while saving" in str(raised.value)) == (expected is PeerError)


def test_step_is_not_saved_twice(manager):
    first = manager()
    model, optimizer = build()
    first.save(1, model, optimizer, {"n": 1})
    before = snapshot(model, optimizer)
    train(model, optimizer)
    first.save(1, model, optimizer, {"n": 2})
    assert first.resume(model, optimizer).state == {"n": 1}
    assert same(before, everything(model, optimizer))


def test_retention_preserves_newest_checkpoints(manager, tmp_path):
    saved(manager(keep_latest=2), 1, 2, 10)
    assert steps(tmp_path) == ["step-10", "step-2"]


def test_damaged_directories_do_not_displace_valid_checkpoint(manager, tmp_path):
    first = manager(keep_latest=2)
    last = saved(first, 1)
    for number in (2, 3, 4):
        (tmp_path / f"checkpoints/step-{number}").mkdir()
        (tmp_path / f"checkpoints/step-{number}/rank-00000.safetensors").write_bytes(b"incomplete")
    model, optimizer = build(seed=1)
    first.save(5, model, optimizer, {})
    assert {"step-1", "step-5"} <= set(steps(tmp_path))
    (tmp_path / "checkpoints/step-5/index.json").unlink()
    assert first.resume(model, optimizer).step == 1
    assert same(everything(model, optimizer), last)


def test_temporary_directories_of_killed_runs_are_removed(manager, tmp_path):
    stale = tmp_path / "checkpoints/step-7.tmp-0123"
    stale.mkdir(parents=True)
    (stale / "rank-00000.safetensors").write_bytes(b"half")
    first = manager()
    assert steps(tmp_path) == []
    assert first.resume(*build()) is None


def test_second_process_is_rejected(manager, tmp_path, monkeypatch):
    manager()
    code = f"""
import logging, pathlib
from torchmm.training.checkpoint import directory as d
d._LOCK_WAIT_S = 0.1
d.CheckpointDirectory(pathlib.Path({str(tmp_path / "checkpoints")!r}), logging).acquire_lock()
"""
    second = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert f"in use by another run (process {os.getpid()} on" in second.stderr


def test_fresh_start_sets_old_checkpoints_aside(manager, tmp_path):
    first = manager(resume="none", keep_latest=2)
    saved(first, 5, 6)
    assert first.resume(*build()) is None
    saved(first, 1)
    assert "step-1" in steps(tmp_path) and "step-6" not in steps(tmp_path)
    assert len(steps(tmp_path)) == 3


def test_file_named_like_checkpoint_is_set_aside(manager, tmp_path):
    saved(manager(), 1)
    directory = tmp_path / "checkpoints"
    (directory / "step-2").write_text("no checkpoint")
    second = manager()
    model, optimizer = build()
    assert second.resume(model, optimizer).step == 1
    assert (directory / steps(tmp_path)[1]).read_text() == "no checkpoint"
    saved(second, 2)
    assert not find_problems(directory / "step-2")
    (directory / "step-3").write_text("created during the run")
    with pytest.raises(CheckpointError, match=r"cannot save .*step-3"):
        second.save(3, model, optimizer, {})


def test_named_checkpoint_resumes_and_later_are_set_aside(manager, tmp_path):
    saved(manager(keep_latest=3), 1, 2, 3)
    second = manager(resume=str(tmp_path / "checkpoints/step-2"))
    assert second.resume(*build()).step == 2
    assert "step-3" not in steps(tmp_path)
    assert [n.partition(".")[0] for n in steps(tmp_path)] == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize("resume", ["none", "step-1"])
def test_restarted_process_resumes_newest_checkpoint(manager, tmp_path, resume):
    choice = resume if resume == "none" else str(tmp_path / "checkpoints/step-1")
    first = manager(resume=choice)
    saved(first, 1, 2)
    assert first.resume(*build(), restarted=True).step == 2


def test_different_recipe_is_logged(manager, caplog):
    saved(manager(recipe="one", table={"training": {"steps": 4, "seed": 1}}), 1)
    manager(recipe="two", table={"training": {"steps": 9, "seed": 1}}).resume(*build())
    assert "step-1 was saved with a different recipe: training.steps 4 -> 9\n" in caplog.text
    caplog.clear()
    manager(recipe="other order", table={"training": {"seed": 1, "steps": 4}}).resume(*build())
    assert "a different recipe" not in caplog.text


def test_different_recipe_digest_is_logged(manager, caplog):
    saved(manager(recipe="one"), 1)
    manager(recipe="two").resume(*build())
    assert "with a different recipe, which the checkpoint does not contain" in caplog.text


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(2))


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def test_missing_and_extra_names_are_rejected(manager, tmp_path):
    first = manager(keep_latest=2)
    wider = Wider()
    first.save(1, wider, optimizer_of(wider), {})
    with pytest.raises(CheckpointError, match=r"not in the model: model\.extra"):
        first.load(tmp_path / "checkpoints/step-1", *build())
    saved(first, 2)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.extra"):
        first.load(tmp_path / "checkpoints/step-2", wider, optimizer_of(wider))


def test_different_shapes_and_dtypes_change_no_state(manager, tmp_path):
    first = manager()
    saved(first, 1)
    path = tmp_path / "checkpoints/step-1"
    for kwargs, message in [
        (
            {"width": 4},
            r"model\.embed\.weight: shape \[5, 6\] in the checkpoint, \[5, 4\] in the model",
        ),
        (
            {"dtype": torch.bfloat16},
            r"model\.embed\.weight: torch\.float32 in the checkpoint",
        ),
    ]:
        model, optimizer = build(**kwargs)
        before = snapshot(model, optimizer)
        with pytest.raises(CheckpointError, match=message):
            first.load(path, model, optimizer)
        assert same(before, everything(model, optimizer))


@pytest.mark.parametrize("stepped", [False, True])
def test_different_frozen_parameters_are_rejected(manager, tmp_path, stepped):
    first = manager()
    model, optimizer = build()
    if stepped:
        train(model, optimizer)
    first.save(1, model, optimizer, {})
    path = tmp_path / "checkpoints/step-1"
    model.scale.requires_grad_(False)
    with pytest.raises(
        CheckpointError, match="trainable in the checkpoint, but frozen in the recipe: scale"
    ):
        first.load(path, model, optimizer_of(model))
    model.requires_grad_(True)
    with pytest.raises(
        CheckpointError,
        match=r"frozen in the checkpoint, but trainable in the recipe: frozen\.bias",
    ):
        first.load(path, model, optimizer_of(model))
    first.load(path, model, None)


def test_state_that_is_not_json_is_rejected(manager):
    with pytest.raises((TypeError, ValueError)):
        manager().save(1, *build(), {"position": float("nan")})


def test_files_are_readable_by_safetensors(manager, tmp_path):
    last = saved(manager(), 1)
    tensors = load_file(tmp_path / "checkpoints/step-1/rank-00000.safetensors")
    assert torch.equal(tensors["model.embed.weight[0,0]"], last["embed.weight"])
    assert torch.equal(tensors["model.scale[]"], last["scale"])


def test_manifest_describes_run(manager, tmp_path):
    saved(manager(), 4)
    manifest = json.loads((tmp_path / "checkpoints/step-4/MANIFEST.json").read_bytes())
    assert manifest["step"] == 4 and manifest["layout"] == {"shard": 1}
    assert manifest["torch"] == torch.__version__ and manifest["recipe_sha256"] == "recipe"
