"""Small recipes on emulated CUDA devices: no races, no unexpected waits and no hangs.

The third step of every run is logged by `fakecuda` and checked (`fakecuda.races`, `fakecuda.hangs`,
`fakecuda.records`). The emulation does not cover speed, numerics of GPU kernels, and kernels that
are missing on CUDA.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from tiny_recipe import ONLY_TRAINS, ROOT, overrides
from tiny_recipe import records as metrics
from train_server import TrainServer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fakecuda.hangs import find_stuck, mismatches
from fakecuda.races import (
    operations_before_end,
    overlapped_operations,
    races,
    still_running,
)
from fakecuda.records import Record, action_of, host_waits, read_records

STEP = 3
LIMIT_S = 380
GPU_CHECKS = ("losses", "attention", "families")
MAX_KERNELS = 4300
"""Kernels of a step of the quickstart case. The count was 4,196; a foreach call counts as one."""
HARDWARE_QUEUES = 32  # the setting of `torchmm.parallel.p2p`


class Case(NamedTuple):
    ranks: int
    changes: Mapping[str, object] = MappingProxyType({})
    """Changes of the tiny recipe."""
    recipe: str = ""
    """Recipe that is used instead of the quickstart."""
    waits: int = 1
    """Number of host waits for the device per step."""
    offloads: bool = False
    """Whether all layer inputs are offloaded to host memory."""


TENSOR = {"parallel__tensor": 2, "parallel__sequence_parallel": "true"}
COLOCATED = {
    "parallel__pipeline": 2,
    "parallel__placement": "colocated",
    "parallel__schedule": "optimus",
}
ENCODER_KERNELS = (
    COLOCATED
    | TENSOR
    | {
        "parallel__tp_comm_fraction": 0.6,
        "parallel__search__background": "false",
    }
)
ASYNC = TENSOR | {"parallel__async_tensor_parallel": "true"}
HOST_STATES = {
    "checkpoint__interval": STEP,
    "optimizer__offload": "true",
    "optimizer__state_dtype": "int8",
    "training__parameter_dtype": "bfloat16",
}
CONTEXT_PARALLEL = {
    "parallel__pipeline": 1,
    "parallel__schedule": "separated",
    "parallel__llm__context": 2,
}
ADAPTERS = {"adapters__small": '{modules = ["llm"], rank = 4}'}
FLOAT8 = {
    "compile__enabled": "true",
    "float8__scaling": "rowwise",
    "float8__emulate": "true",
    "float8__first_layers": 0,
    "float8__last_layers": 0,
}
SPEECH = {
    "model__encoders__speech": '{modality = "audio", connector = "pixel_shuffle_mlp", '
    "pixel_shuffle_factor = 2, "
    'config = {model_type = "whisper", num_mel_bins = 80, d_model = 64, encoder_layers = 2, '
    "encoder_attention_heads = 4, encoder_ffn_dim = 128, max_source_positions = 100}}",
}
"""A second encoder, which runs on dummy audio."""
UNSPLIT_ENCODERS = {"parallel__vision__sub_microbatch_images": 64}
GRAPHS = UNSPLIT_ENCODERS | {"compile__cuda_graphs": "true"}
CASES = {
    "quickstart": Case(1),
    "fsdp2": Case(2),
    "reduced per microbatch": Case(2, {"parallel__gradient_reduction": "microbatch"}),
    "balanced images": Case(2, {"data__balance": "images"}),
    "balanced images, two encoders": Case(2, {"data__balance": "images"} | SPEECH),
    "tp and sp": Case(2, TENSOR),
    "async tp": Case(2, ASYNC),
    "ring": Case(
        2,
        ASYNC | {"parallel__async_tensor_backend": "ring", "parallel__async_tensor_chunks": 2},
    ),
    "context 2, adapters, delta nets": Case(
        2, CONTEXT_PARALLEL | ADAPTERS, recipe="tiny/siglip2_qwen3_5.toml"
    ),
    "pp2": Case(2, {"parallel__pipeline": 2}),
    "pp2 x fsdp2": Case(4, {"parallel__pipeline": 2}),
    "zero bubble": Case(2, {"parallel__pipeline": 2, "parallel__schedule": "zero_bubble"}),
    "colocated": Case(2, COLOCATED),
    "overlapped reductions": Case(4, COLOCATED),
    "kernels": Case(4, ENCODER_KERNELS),
    "kernels of unsharded encoders": Case(
        4,
        ENCODER_KERNELS
        | {
            "parallel__vision__tensor": 1,
            "parallel__tp_comm_fraction": 0.9,
            "parallel__vision__sub_microbatch_images": 8,
        },
    ),
    "searched": Case(2, {"parallel__pipeline": 2, "parallel__schedule": "searched"}),
    "generator": Case(1, recipe="quickstart_generation.toml"),
    "balanced images, generator": Case(
        2,
        {"data__balance": "images", "parallel__pipeline": 1},
        recipe="quickstart_generation.toml",
    ),
    "disaggregated": Case(3, recipe="quickstart_disaggregated.toml"),
    "compiled, float8": Case(1, FLOAT8),
    "compiled, float32": Case(1, {"compile__enabled": "true", "training__dtype": "float32"}),
    "cuda graphs": Case(1, GRAPHS),
    "native resolution": Case(1, recipe="tiny/siglip2_qwen3.toml"),
    "checkpoint": Case(2, {"checkpoint__interval": 2, "checkpoint__export_hf": "true"}),
    "recomputed": Case(1, {"activation_checkpoint__mode": "full"}),
    "chunked loss": Case(2, {"model__chunked_loss": "true"}),
    "offloaded states": Case(2, HOST_STATES),
    "offloaded inputs": Case(
        2, {"parallel__pipeline": 2, "activation_checkpoint__mode": "auto"}, offloads=True
    ),
    "muon": Case(2, {"optimizer__name": "muon", "training__parameter_dtype": "bfloat16"}),
}
DEFAULT = {"quickstart"}
"""Cases that run without `--all`."""
QUICK_DEFECTS = DEFAULT | {"early_wait", "read_device_value", "late_timing"}
"""Cases that run without `--all`, and the defects that are injected into them."""


@pytest.fixture(scope="session")
def compiled_device() -> None:
    """Compile the emulated device."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not (shutil.which("g++") and header.exists()):
        pytest.skip("the emulated device needs a C++ compiler and the Python headers")
    if not shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        pytest.skip("the emulated device needs ninja")
    run([sys.executable, str(HERE / "fakecuda" / "build.py")])


@functools.cache
def emulation_server() -> TrainServer:
    """Return the server that runs scripts on emulated devices."""
    return TrainServer(setup="emulate")


def run(command: list[str], **environment: str) -> None:
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {
        **os.environ,
        "PATH": paths,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, ROOT / "tests/helpers"))),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    process = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-6000:]


def logged(
    case: Case, tmp_path: Path, data: Path, defect: str = "", devices: int = 8
) -> dict[int, list[Record]]:
    """Run a case and return the logged operations of its ranks."""
    settings: dict[str, object] = {
        "training__dtype": "bfloat16",
        "training__steps": STEP,
        "checkpoint__resume": "none",
        "parallel__timeout_s": 120,
    }
    if case.recipe:
        config = ROOT / "recipes" / case.recipe
        no_generation = {"validation__generated_images": 0, "validation__num_samples": 0}
        values = settings | {"name": "run", "output_dir": tmp_path} | dict(case.changes)
        if "generation" in case.recipe or "disaggregated" in case.recipe:
            values |= no_generation
        if case.ranks == 1:
            values |= {"parallel__pipeline": 1, "parallel__schedule": "separated"}
        options = ONLY_TRAINS | {f"--{k.replace('__', '.')}": v for k, v in values.items()}
        arguments = [f"{key}={value}" for key, value in options.items()]
    else:
        config = ROOT / "recipes" / "quickstart.toml"
        values = {"parallel__vision__sub_microbatch_images": 2} | settings | dict(case.changes)
        arguments = overrides(tmp_path / "run", data, **values)
    command = [str(ROOT / "train.py"), "--config", str(config), *arguments]
    log = tmp_path / "log"
    environment = {
        "FAKECUDA_LOG": log,
        "FAKECUDA_DEFECT": defect,
        "FAKECUDA_OFFLOAD": "1" if case.offloads else "",
        "FAKECUDA_DEVICES": devices,
    }
    codes, output = emulation_server().run(
        command, tmp_path / "output", case.ranks, script=HERE / "emulate.py", **environment
    )
    assert codes == [0] * case.ranks, output[-6000:]
    ranks = read_records(log, STEP)
    assert len(ranks) == case.ranks
    return ranks


def all_races(ranks: dict[int, list[Record]]) -> Counter:
    return sum((races(records) for records in ranks.values()), Counter())


def unexpected_waits(ranks: dict[int, list[Record]], at_most: int) -> list:
    """Return waits within actions, or all waits of ranks with more than `at_most` waits."""
    unexpected: list = []
    for records in ranks.values():
        waits = host_waits(records)
        inside = [w for w in waits if w.action not in ("before the plan", "after the plan")]
        unexpected += inside if sum(waits.values()) <= at_most else list(waits.items())
    return unexpected


def waits_by_rank(ranks: dict[int, list[Record]]) -> list[int]:
    """Return how often the host of each rank waits for its device in the step."""
    return [sum(host_waits(records).values()) for _, records in sorted(ranks.items())]


def updates_after_wait(ranks: dict[int, list[Record]]) -> list[str]:
    """Return kernels of optimizers that the host queues after its first wait after the plan."""
    late_updates = []
    for records in ranks.values():
        names = [r.name if r.kind == "kernel" else r.kind for r in records if is_after_plan(r)]
        waits = [i for i, name in enumerate(names) if name == "sync"]
        updates = [i for i, name in enumerate(names) if "_fused_adamw_" in name]
        assert waits and updates
        late_updates += [names[i] for i in updates if i > waits[0]]
    return late_updates


def clipping_kernels(records: list[Record]) -> list[str]:
    """Return kernels after the plan that write gradients, except those of the optimizer.

    The optimizer accesses parameters, gradients, states and scalars of 4 bytes.
    """
    after = [r for r in records if r.kind == "kernel" and is_after_plan(r)]
    updates = [r for r in after if "_fused_adamw_" in r.name]
    updated = {
        (a, begin, end) for r in updates for a, begin, end, _ in r.accesses if end - begin > 4
    }
    return [
        r.name
        for r in after
        if r not in updates
        and any(written and (a, begin, end) in updated for a, begin, end, written in r.accesses)
    ]


def is_after_plan(record: Record) -> bool:
    return action_of(record.label) == "after the plan"


def overlapped_copies(ranks: dict[int, list[Record]]) -> list[int]:
    """Return the number of state copies from the host that overlap the update, by rank."""
    return [
        overlapped_operations(records, "low_precision/cpu_offload.py") for records in ranks.values()
    ]


def overlapped_reductions(ranks: dict[int, list[Record]]) -> list[int]:
    """Return the number of operations that overlap gradient reductions, by rank."""
    source_file = "parallel/torch_compat.py"
    return [operations_before_end(records, source_file) for records in ranks.values()]


def overlapped_inputs(ranks: dict[int, list[Record]]) -> list[int]:
    """Return the number of operations that overlap copies of layer inputs, by rank."""
    source_file = "parallel/activation_offload.py"
    return [operations_before_end(records, source_file) for records in ranks.values()]


def nested_kernels(records: list[Record]) -> int:
    """Count switches from a kernel of an LLM action to an encoder kernel and back."""
    labels = [label for label, _ in groupby(r.label for r in records if r.kind == "kernel")]
    return sum(a == c != b for a, b, c in zip(labels, labels[1:], labels[2:], strict=False))


def shared_communication(
    records: list[Record], other_records: list[Record]
) -> list[tuple[str, str]]:
    """Return the operations of communicators that both ranks use, in order."""
    names = {r.text.partition("|")[0] for r in other_records if r.kind == "comm"}
    operations = [(r.text.partition("|")[0], r.name) for r in records if r.kind == "comm"]
    return [operation for operation in operations if operation[0] in names]


def running_state_copies(ranks: dict[int, list[Record]], tmp_path: Path) -> list[set[int]]:
    """Return the streams that still run when a checkpoint is saved, by rank."""
    saves = read_records(tmp_path / "log", STEP, "save")
    assert saves.keys() == ranks.keys()
    streams_by_rank = [still_running(records, saves[rank]) for rank, records in ranks.items()]
    return [streams for streams in streams_by_rank if streams]


def selected_cases(names: Iterable[str]) -> list:
    return [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.campaign) for n in names]


@pytest.mark.slow
def test_emulated_device_detects_errors(compiled_device) -> None:
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest",
         "-c", os.devnull, str(HERE / "checks_of_fakecuda.py")])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", selected_cases(CASES))
def test_step_has_no_races_waits_or_hangs(name, compiled_device, tmp_path, real_data) -> None:
    case = CASES[name]
    ranks = logged(case, tmp_path, real_data)
    assert not all_races(ranks)
    assert not unexpected_waits(ranks, case.waits)
    assert waits_by_rank(ranks) == [case.waits] * case.ranks
    assert not mismatches(ranks)
    assert not find_stuck(ranks)
    assert not find_stuck(ranks, queues=HARDWARE_QUEUES)
    if name == "quickstart":
        assert not updates_after_wait(ranks)
        assert not any(map(clipping_kernels, ranks.values()))
        assert sum(record.kind == "kernel" for record in ranks[0]) <= MAX_KERNELS
    if name == "overlapped reductions":
        assert all(overlapped_reductions(ranks))
    if name == "offloaded inputs":
        assert all(overlapped_inputs(ranks))
    if name.startswith("kernels"):
        assert all(map(nested_kernels, ranks.values()))
        for pair in ((0, 1), (2, 3)) if name == "kernels" else ():
            first, second = (ranks[rank] for rank in pair)
            operations = shared_communication(first, second)
            assert operations == shared_communication(second, first)
            alternations = len(list(groupby(communicator for communicator, _ in operations)))
            assert alternations > 2, "the operations of two communicators alternate"
    if name == "offloaded states":
        assert all(overlapped_copies(ranks))
        assert not running_state_copies(ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "name"),
    [
        pytest.param(*pair, marks=() if set(pair) <= QUICK_DEFECTS else pytest.mark.campaign)
        for pair in (
            ("read_device_value", "quickstart"),
            ("early_wait", "quickstart"),
            ("pageable_copy", "quickstart"),
            ("late_timing", "quickstart"),
            ("missing_reduction_wait", "overlapped reductions"),
            ("freed_early", "async tp"),
            ("used_state_slot", "offloaded states"),
            ("missing_state_wait", "offloaded states"),
            ("serial_states+early_checkpoint", "offloaded states"),
            ("freed_inputs", "offloaded inputs"),
            ("missing_input_wait", "offloaded inputs"),
            ("inputs_in_used_memory", "offloaded inputs"),
            ("serial_inputs", "offloaded inputs"),
            ("shared_communicator", "pp2"),
            ("swapped_sends", "pp2"),
        )
    ],
)
def test_defects_are_detected(defect, name, compiled_device, tmp_path, real_data) -> None:
    case = CASES[name]
    case = case._replace(changes={"compile__enabled": "false", **case.changes})
    ranks = logged(case, tmp_path, real_data, defect)
    if defect == "late_timing":
        assert waits_by_rank(ranks) == [CASES[name].waits + 1]
    elif defect in ("read_device_value", "pageable_copy"):
        assert unexpected_waits(ranks, CASES[name].waits)
    elif defect == "early_wait":
        assert updates_after_wait(ranks)
    elif defect in ("shared_communicator", "swapped_sends"):
        assert mismatches(ranks) or find_stuck(ranks)
    elif defect == "serial_inputs":
        assert not any(overlapped_inputs(ranks))
    elif defect == "serial_states+early_checkpoint":
        assert not any(overlapped_copies(ranks))
        assert running_state_copies(ranks, tmp_path)
    else:
        assert all_races(ranks)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_graphs_give_eager_losses(dtype, compiled_device, tmp_path, real_data) -> None:
    settings = {"training__dtype": dtype}
    cases = {"eager": UNSPLIT_ENCODERS, "graphs": GRAPHS, "stale_graph_input": GRAPHS}
    losses = {}
    for name, changes in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        defect = "" if name in ("eager", "graphs") else name
        logged(Case(1, changes | settings), folder, real_data, defect)
        losses[name] = [record["loss"] for record in metrics(folder / "run")]
    limit = 1e-5 if dtype == "float32" else 1e-3
    assert losses["graphs"] == pytest.approx(losses["eager"], rel=limit)
    assert losses["stale_graph_input"] != pytest.approx(losses["eager"], rel=limit)


@pytest.mark.campaign
def test_one_hardware_queue_hangs_pipeline(compiled_device, tmp_path, real_data) -> None:
    """`check_hardware_queues` rejects this setting."""
    ranks = logged(CASES["pp2"], tmp_path, real_data)
    assert find_stuck(ranks, queues=1)


@pytest.mark.campaign
def test_two_ranks_on_one_gpu_are_rejected(compiled_device, tmp_path, real_data) -> None:
    """NCCL would fail in the middle of a step without an explanation."""
    with pytest.raises(AssertionError, match="ranks 0 and 1 use the same GPU, fake-0"):
        logged(CASES["pp2"], tmp_path, real_data, devices=1)


@pytest.mark.slow
@pytest.mark.campaign
def test_context_parallel_validation_runs_on_device(compiled_device, tmp_path, real_data) -> None:
    """Slices of microbatches are pinned, which requires microbatches on the host."""
    validation = {"interval": STEP, "num_samples": 2, "batches": 1, "max_new_tokens": 3}
    changes = CONTEXT_PARALLEL | {f"validation__{key}": value for key, value in validation.items()}
    logged(Case(2, changes), tmp_path, real_data)
    assert len(json.loads((tmp_path / "run" / "samples.json").read_text())) == 2


@pytest.mark.slow
@pytest.mark.campaign
def test_gpu_check_accepts_correct_results(compiled_device, tmp_path, real_data) -> None:
    file = tmp_path / "lines.jsonl"
    run([sys.executable, "scripts/gpu_check.py", "--gpus=1", "--small", "--minutes=6",
         f"--through={HERE / 'emulate.py'}", f"--json={file}"])  # fmt: skip
    machine, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert machine["families"]
    by_check = {name: [x for x in lines if x["check"] == name] for name in GPU_CHECKS}
    assert {x["verdict"] for x in by_check["attention"]} == {"ok"}
    assert [x["verdict"] for x in by_check["families"]] == ["ok"] * 4
    assert [x["verdict"] for x in by_check["losses"]][:2] == ["ok", "ok"]
    assert {x["check"] for x in lines} == set(GPU_CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ("small", "trace"),
        pytest.param(("start", "ceilings", "attention"), marks=pytest.mark.campaign),
        pytest.param(("large", "layers", "stages"), marks=pytest.mark.campaign),
        pytest.param(("switches",), marks=pytest.mark.campaign),
        pytest.param(("second",), marks=pytest.mark.campaign),
    ],
    ids=lambda parts: parts[-1],
)
def test_one_gpu_parts_run_without_errors(parts, compiled_device, tmp_path) -> None:
    run([sys.executable, str(HERE / "emulate.py"), "benchmarks/one_gpu.py", "--small",
         "--out", str(tmp_path), "--parts", *parts])  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    assert not [row for row in rows if row["metric"] in ("error", "out of memory")]
    assert not [row for row in rows if row["note"].startswith(("WRONG", "time limit"))]
    measured = {row["part"] for row in rows if row["value"] is not None}
    assert measured >= set(parts)
