"""Small recipes on emulated CUDA devices: no races, no unexpected waits, no order that needs luck.

The third step of every run is logged by `fakecuda` and looked at (`fakecuda.races`,
`fakecuda.hangs`, `fakecuda.records`). What the emulation cannot tell: speed, numerics of GPU
kernels, kernels that are missing on CUDA.
"""

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
from ports import free_port
from tiny_recipe import ONLY_TRAINS, ROOT, overrides
from tiny_recipe import records as metrics

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fakecuda.hangs import mismatches, stuck
from fakecuda.races import (
    operations_before_the_end,
    operations_beside,
    races,
    still_running,
)
from fakecuda.records import Record, action_of, host_waits, read_records

STEP = 3
LIMIT_S = 380
GPU_CHECKS = ("losses", "attention", "families")
MAX_KERNELS = 4300
"""Kernels of a step of the quickstart case. 4,196 were counted; a foreach call counts as one."""
HARDWARE_QUEUES = 32  # as `torchmm.parallel.p2p` asks for


class Case(NamedTuple):
    ranks: int
    changes: Mapping[str, object] = MappingProxyType({})
    """Of the tiny recipe."""
    recipe: str = ""
    """Another recipe than the quickstart's, as it is."""
    waits: int = 1
    """How often the host waits for the device in a step."""
    offloads: bool = False
    """Whether all inputs of layers wait in the host's memory."""


TENSOR = {"parallel__tensor": 2, "parallel__sequence_parallel": "true"}
COLOCATED = {
    "parallel__pipeline": 2,
    "parallel__placement": "colocated",
    "parallel__schedule": "optimus",
}
PIECES = (
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
SHARED_ROWS = {
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
WHOLE_ENCODERS = {"parallel__vision__sub_microbatch_images": 64}
GRAPHS = WHOLE_ENCODERS | {"compile__cuda_graphs": "true"}
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
        2, SHARED_ROWS | ADAPTERS, recipe="tiny/siglip2_qwen3_5.toml"
    ),
    "pp2": Case(2, {"parallel__pipeline": 2}),
    "pp2 x fsdp2": Case(4, {"parallel__pipeline": 2}),
    "zero bubble": Case(2, {"parallel__pipeline": 2, "parallel__schedule": "zero_bubble"}),
    "colocated": Case(2, COLOCATED),
    "reductions beside": Case(4, COLOCATED),
    "pieces": Case(4, PIECES),
    "pieces of whole encoders": Case(
        4,
        PIECES
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
    "states on the host": Case(2, HOST_STATES),
    "inputs on the host": Case(
        2, {"parallel__pipeline": 2, "activation_checkpoint__mode": "auto"}, offloads=True
    ),
    "muon": Case(2, {"optimizer__name": "muon", "training__parameter_dtype": "bfloat16"}),
}
DEFAULT = {"quickstart"}
"""Cases that run without `--all`."""
QUICK_DEFECTS = DEFAULT | {"early_wait", "look_at_device", "timed_late"}
"""These and the defects that are looked for in them."""


@pytest.fixture(scope="session")
def built() -> None:
    """The compiled device."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not (shutil.which("g++") and header.exists()):
        pytest.skip("the emulated device needs a C++ compiler and Python's headers")
    if not shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        pytest.skip("the emulated device needs ninja")
    run([sys.executable, str(HERE / "fakecuda" / "build.py")])


def run(command: list[str], **environment: str) -> None:
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {
        **os.environ,
        "PATH": paths,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, ROOT / "tests/helpers"))),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def logged(case: Case, tmp_path: Path, data: Path, defect: str = "") -> dict[int, list[Record]]:
    """What the ranks of a case did in the step."""
    settings: dict[str, object] = {
        "training__dtype": "bfloat16",
        "training__steps": STEP,
        "checkpoint__resume": "none",
        "parallel__timeout_s": 120,
    }
    if case.recipe:
        config = ROOT / "recipes" / case.recipe
        drawn = {"validation__generated_images": 0, "validation__num_samples": 0}
        values = settings | {"name": "run", "output_dir": tmp_path} | dict(case.changes)
        if "generation" in case.recipe or "disaggregated" in case.recipe:
            values |= drawn
        if case.ranks == 1:
            values |= {"parallel__pipeline": 1, "parallel__schedule": "separated"}
        named = ONLY_TRAINS | {f"--{k.replace('__', '.')}": v for k, v in values.items()}
        arguments = [f"{key}={value}" for key, value in named.items()]
    else:
        config = ROOT / "recipes" / "quickstart.toml"
        values = {"parallel__vision__sub_microbatch_images": 2} | settings | dict(case.changes)
        arguments = overrides(tmp_path / "run", data, **values)
    start = [sys.executable]
    if case.ranks > 1:
        start += ["-m", "torch.distributed.run", f"--nproc-per-node={case.ranks}"]
        start += [f"--master-port={free_port()}"]
    command = [*start, str(HERE / "emulate.py"), "train.py", "--config", str(config), *arguments]
    log = tmp_path / "log"
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if case.offloads:
        shared["FAKECUDA_OFFLOAD"] = "1"
    run(command, FAKECUDA_LOG=str(log), FAKECUDA_DEFECT=defect, **shared)
    ranks = read_records(log, STEP)
    assert len(ranks) == case.ranks
    return ranks


def found_races(ranks: dict[int, list[Record]]) -> Counter:
    return sum((races(records) for records in ranks.values()), Counter())


def unexpected_waits(ranks: dict[int, list[Record]], at_most: int) -> list:
    """Of the rank with most: all inside of actions, and those behind the plan beyond a number."""
    found: list = []
    for records in ranks.values():
        waits = host_waits(records)
        inside = [w for w in waits if w.action not in ("before the plan", "behind the plan")]
        found += inside if sum(waits.values()) <= at_most else list(waits.items())
    return found


def waits_by_rank(ranks: dict[int, list[Record]]) -> list[int]:
    """Return how often the host of each rank waits for its device in the step."""
    return [sum(host_waits(records).values()) for _, records in sorted(ranks.items())]


def updates_after_a_wait(ranks: dict[int, list[Record]]) -> list[str]:
    """Return kernels of optimizers that the host queues after its first wait after the plan."""
    found = []
    for records in ranks.values():
        names = [r.name if r.kind == "kernel" else r.kind for r in records if is_after_plan(r)]
        waits = [i for i, name in enumerate(names) if name == "sync"]
        updates = [i for i, name in enumerate(names) if "_fused_adamw_" in name]
        assert waits and updates
        found += [names[i] for i in updates if i > waits[0]]
    return found


def clipping_kernels(records: list[Record]) -> list[str]:
    """Return kernels after the plan that write gradients, except those of the optimizer.

    What the optimizer accesses are parameters, gradients, states and scalars of 4 bytes.
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
    return action_of(record.label) == "behind the plan"


def copies_beside(ranks: dict[int, list[Record]]) -> list[int]:
    """By rank: how many copies of states from the host run beside the update."""
    return [
        operations_beside(records, "low_precision/cpu_offload.py") for records in ranks.values()
    ]


def reductions_beside(ranks: dict[int, list[Record]]) -> list[int]:
    """By rank: how many operations are begun while gradients may still be reduced."""
    place = "parallel/torch_private.py"
    return [operations_before_the_end(records, place) for records in ranks.values()]


def inputs_beside(ranks: dict[int, list[Record]]) -> list[int]:
    """By rank: how many operations are begun while inputs of layers may still be copied."""
    place = "parallel/host_inputs.py"
    return [operations_before_the_end(records, place) for records in ranks.values()]


def pieces_inside(records: list[Record]) -> int:
    """How often a rank turns from a kernel of an LLM action to one of an encoder's and back."""
    labels = [label for label, _ in groupby(r.label for r in records if r.kind == "kernel")]
    return sum(a == c != b for a, b, c in zip(labels, labels[1:], labels[2:], strict=False))


def shared_communication(records: list[Record], others: list[Record]) -> list[tuple[str, str]]:
    """A rank's operations of communicators that another one has too, all in one order."""
    names = {r.text.partition("|")[0] for r in others if r.kind == "comm"}
    found = [(r.text.partition("|")[0], r.name) for r in records if r.kind == "comm"]
    return [operation for operation in found if operation[0] in names]


def states_on_their_way(ranks: dict[int, list[Record]], tmp_path: Path) -> list[set[int]]:
    """By rank that has some: streams that still run when a checkpoint is taken."""
    saves = read_records(tmp_path / "log", STEP, "save")
    assert saves.keys() == ranks.keys()
    found = [still_running(records, saves[rank]) for rank, records in ranks.items()]
    return [streams for streams in found if streams]


def of_selected(names: Iterable[str]) -> list:
    return [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.campaign) for n in names]


@pytest.mark.slow
def test_the_emulated_device_finds_what_it_is_for(built) -> None:
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest",
         "-c", os.devnull, str(HERE / "checks_of_fakecuda.py")])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", of_selected(CASES))
def test_a_step_has_no_races_waits_or_hangs(name, built, tmp_path, real_data) -> None:
    case = CASES[name]
    ranks = logged(case, tmp_path, real_data)
    assert not found_races(ranks)
    assert not unexpected_waits(ranks, case.waits)
    assert waits_by_rank(ranks) == [case.waits] * case.ranks
    assert not mismatches(ranks)
    assert not stuck(ranks)
    assert not stuck(ranks, queues=HARDWARE_QUEUES)
    if name == "quickstart":
        assert not updates_after_a_wait(ranks)
        assert not any(map(clipping_kernels, ranks.values()))
        assert sum(record.kind == "kernel" for record in ranks[0]) <= MAX_KERNELS
    if name == "reductions beside":
        assert all(reductions_beside(ranks))
    if name == "inputs on the host":
        assert all(inputs_beside(ranks))
    if name.startswith("pieces"):
        assert all(map(pieces_inside, ranks.values()))
        for pair in ((0, 1), (2, 3)) if name == "pieces" else ():
            first, second = (ranks[rank] for rank in pair)
            operations = shared_communication(first, second)
            assert operations == shared_communication(second, first)
            turns = len(list(groupby(communicator for communicator, _ in operations)))
            assert turns > 2, "two communicators take turns"
    if name == "states on the host":
        assert all(copies_beside(ranks))
        assert not states_on_their_way(ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "name"),
    [
        pytest.param(*pair, marks=() if set(pair) <= QUICK_DEFECTS else pytest.mark.campaign)
        for pair in (
            ("look_at_device", "quickstart"),
            ("early_wait", "quickstart"),
            ("pageable_copy", "quickstart"),
            ("timed_late", "quickstart"),
            ("unreduced", "reductions beside"),
            ("freed_early", "async tp"),
            ("slot_in_use", "states on the host"),
            ("not_arrived", "states on the host"),
            ("in_turn+saved_early", "states on the host"),
            ("freed_inputs", "inputs on the host"),
            ("missing_inputs", "inputs on the host"),
            ("inputs_without_room", "inputs on the host"),
            ("inputs_in_turn", "inputs on the host"),
            ("one_communicator", "pp2"),
            ("swapped_sends", "pp2"),
        )
    ],
)
def test_defects_are_found(defect, name, built, tmp_path, real_data) -> None:
    ranks = logged(CASES[name], tmp_path, real_data, defect)
    if defect == "timed_late":
        assert waits_by_rank(ranks) == [CASES[name].waits + 1]
    elif defect in ("look_at_device", "pageable_copy"):
        assert unexpected_waits(ranks, CASES[name].waits)
    elif defect == "early_wait":
        assert updates_after_a_wait(ranks)
    elif defect in ("one_communicator", "swapped_sends"):
        assert mismatches(ranks) or stuck(ranks)
    elif defect == "inputs_in_turn":
        assert not any(inputs_beside(ranks))
    elif defect == "in_turn+saved_early":
        assert not any(copies_beside(ranks))
        assert states_on_their_way(ranks, tmp_path)
    else:
        assert found_races(ranks)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_graphs_give_eager_losses(dtype, built, tmp_path, real_data) -> None:
    settings = {"training__dtype": dtype}
    cases = {"eager": WHOLE_ENCODERS, "graphs": GRAPHS, "stale_graph_input": GRAPHS}
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
def test_one_hardware_queue_stops_a_pipeline(built, tmp_path, real_data) -> None:
    """Why `check_hardware_queues` refuses it."""
    ranks = logged(CASES["pp2"], tmp_path, real_data)
    assert stuck(ranks, queues=1)


@pytest.mark.campaign
def test_two_ranks_on_one_gpu_are_refused(built, tmp_path, real_data, monkeypatch) -> None:
    """NCCL would refuse them, in the middle of a step, without saying what to do."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "1")
    with pytest.raises(AssertionError, match="ranks 0 and 1 use the same GPU, fake-0"):
        logged(CASES["pp2"], tmp_path, real_data)


@pytest.mark.slow
@pytest.mark.campaign
def test_context_parallel_validation_runs_on_device(built, tmp_path, real_data) -> None:
    """Slices of microbatches are pinned, which requires microbatches on the host."""
    validation = {"interval": STEP, "num_samples": 2, "batches": 1, "max_new_tokens": 3}
    changes = SHARED_ROWS | {f"validation__{key}": value for key, value in validation.items()}
    logged(Case(2, changes), tmp_path, real_data)
    assert len(json.loads((tmp_path / "run" / "samples.json").read_text())) == 2


@pytest.mark.slow
@pytest.mark.campaign
def test_gpu_check_finds_right_results(built, tmp_path, real_data) -> None:
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
def test_one_gpu_parts_run_without_errors(parts, built, tmp_path) -> None:
    run([sys.executable, str(HERE / "emulate.py"), "benchmarks/one_gpu.py", "--small",
         "--out", str(tmp_path), "--parts", *parts])  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    assert not [row for row in rows if row["metric"] in ("error", "out of memory")]
    assert not [row for row in rows if row["note"].startswith(("WRONG", "time limit"))]
    measured = {row["part"] for row in rows if row["value"] is not None}
    assert measured >= set(parts)
