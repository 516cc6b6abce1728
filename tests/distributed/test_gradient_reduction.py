"""Gradient reduction per microbatch gives the gradients of the single-process model."""

from dataclasses import replace

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from test_layouts import CASES_OF_2, CASES_OF_4, Case, compare_all
from torch.utils._python_dispatch import TorchDispatchMode

from torchmm.common.batch import IGNORE_TARGET, Microbatch
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.parallel.apply import parallelize
from torchmm.parallel.fsdp import LayerSharding
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

SCATTER_AND_SUM = ("c10d._reduce_scatter_base", "c10d.allreduce")
EACH = {"gradient_reduction": "microbatch"}
OF_2 = ("fsdp2", "ep2, full recomputation, experts without tokens", "fsdp2, adapter of the LLM")
OF_4 = (
    "fsdp4, no image anywhere",
    "hsdp 2x2",
    "fsdp2 x tp2, sequence parallel",
    "fsdp2 x ep2, experts without tokens",
    "hsdp 2 x ep2",
    "fsdp4, tower and LLM frozen",
    "hsdp 2x2, tower frozen",
    "fsdp2 x tp2, loss in chunks",
)


class CaseWithoutTargets(Case):
    """A case in which microbatches 1, 2 and 6 have no target.

    One rank has no targets in both microbatches, and another in one of them.
    """

    @property
    def batch(self) -> list[Microbatch]:
        """Global batch."""
        microbatches = super().batch
        for index in (1, 2, 6):
            targets_T = torch.full_like(microbatches[index].targets_T, IGNORE_TARGET)
            microbatches[index] = replace(
                microbatches[index], targets_T=targets_T, target_positions_L=None
            )
        return microbatches


def cases(available: list[Case], names: tuple[str, ...]) -> list[Case]:
    selected = [replace(c, pipeline={**c.pipeline, **EACH}) for c in available if c.name in names]
    assert len(selected) == len(names)
    return selected


WITHOUT_TARGETS = [
    CaseWithoutTargets(f"{name}, without targets", pipeline=EACH, **case)
    for name, case in {
        "fsdp4": {"shard": 4},
        "fsdp4, loss in chunks": {"shard": 4, "chunked_loss": True},
        "hsdp 2x2": {"replicate": 2, "shard": 2},
    }.items()
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "compared"),
    [(2, cases(CASES_OF_2, OF_2)), (4, cases(CASES_OF_4, OF_4)), (4, WITHOUT_TARGETS)],
)
def test_gradients_reduced_per_microbatch_equal_single_process(ranks, compared):
    for outcomes in zip(*run_distributed(compare_all, ranks, compared), strict=True):
        for name, loss_error, norm_error, gradient_errors in outcomes:
            assert loss_error <= 1e-5, (name, loss_error)
            assert norm_error <= 1e-5, (name, norm_error)
            assert gradient_errors == {}, (name, gradient_errors)


def test_lost_gradients_of_earlier_microbatches_are_detected():
    for outcomes in run_distributed(_compare_without_earlier_sums, 2):
        assert outcomes[0][3], "no gradient differs"


def _compare_without_earlier_sums() -> list[tuple[str, float, float, dict[str, float]]]:
    prepare = LayerSharding.before_backward

    def forgetful(self: LayerSharding) -> None:
        prepare(self)
        for parameter in self._root.parameters():
            parameter.grad = None

    LayerSharding.before_backward = forgetful
    return compare_all(cases(CASES_OF_2, ("fsdp2",)))


@pytest.mark.slow
def test_gradients_are_reduced_per_microbatch():
    once, each = (
        run_distributed(_count_collectives, 4, reduction)[0] for reduction in ("step", "microbatch")
    )
    scatters, sums, microbatches = once
    assert microbatches == 2 and scatters > 0 and sums > 0
    # Gradients of replicas are summed once per step in both cases.
    assert each == (microbatches * scatters, sums, microbatches)


class OperatorNames(TorchDispatchMode):
    """Dispatch mode that records the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _count_collectives(reduction: str) -> tuple[int, int, int]:
    """Count gradient reduce-scatters, all-reduces and microbatches of an HSDP step."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    case = next(case for case in CASES_OF_4 if case.name == "hsdp 2x2")
    config = ParallelConfig(replicate=2, shard=2, gradient_reduction=reduction)
    mesh = mesh_for(config)
    model = case.model()
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(config, descriptions, [m.meta for m in case.batch])
    stages = split_model_for_rank(model, layout, 0)
    plain = ActivationCheckpointConfig(mode="none"), CompileConfig()
    parallelize(model, mesh, config, *plain, torch.float32)
    materialize(model, "cpu")
    init_weights(model, seed=1)
    pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32)
    share = case.batch[mesh.data_parallel_rank :: mesh.data_parallel_size]
    step, plan = TrainStep(pipeline, mesh), pipeline.plan_training(share)
    with OperatorNames() as called:
        step.run(plan, share, 100)
    scatters, sums = (sum(part in n for n in called.names) for part in SCATTER_AND_SUM)
    return scatters, sums, len(share)
