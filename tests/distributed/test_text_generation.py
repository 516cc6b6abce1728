"""Every layout generates the text that one process generates without a cache."""

from functools import partial

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for, units_for
from shared_reference import on_first_rank
from test_disaggregated_equality import Case as Disaggregated
from test_disaggregated_equality import a_batch, a_model, unit
from test_generator_equality import filled
from test_layouts import Case
from text_writing import Written, differences, prompts_of, written_again

from torchmm.common.batch import Microbatch
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.apply import parallelize
from torchmm.parallel.mesh import encoder_meshes, start_process_group
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.pipeline import Pipeline, plan_layout

PP2 = {"pipeline": 2}
PP3 = {"pipeline": 3, "schedule": "1f1b"}
COLOCATED = {"placement": "colocated", "schedule": "optimus"}
DEEP = {"num_hidden_layers": 4}
DELTA = {"llm": "qwen3_5_text"}
CASES: dict[int, list[Case | Disaggregated]] = {
    2: [
        Case("pp2", pipeline=PP2),
        Case("pp2, delta nets", pipeline={**PP2, "schedule": "zero_bubble"}, **DELTA),
        Case("pp2, separated", pipeline={**PP2, "schedule": "separated"}),
        Case(
            "pp2, interleaved",
            pipeline={**PP2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
            llm_config=DEEP,
        ),
        Case("pp2, adapters", pipeline=PP2, adapters=("llm", "vision")),
        Case("pp2, searched", pipeline={**PP2, "schedule": "searched"}),
        Case("pp2, colocated", pipeline={**PP2, **COLOCATED, "vision": {"pipeline": 1}}),
        Case("tp2, colocated", tensor=2, pipeline={**COLOCATED, "vision": {"tensor": 1}}),
        Case("fsdp2, recomputing", shard=2, recompute="full"),
        Case("fsdp2, gathered once", shard=2, pipeline={"reshard_after_forward": "never"}),
        Case("fsdp2, adapters", shard=2, adapters=("llm",)),
        Case("tp2", tensor=2),
        Case("tp2, sequence parallel", tensor=2, sequence_parallel=True),
        Case(
            "tp2, async",
            tensor=2,
            sequence_parallel=True,
            pipeline={"async_tensor_parallel": True},
        ),
        Case("tp2, adapters", tensor=2, adapters=("llm", "vision")),
        Case("tp2, delta nets", tensor=2, sequence_parallel=True, **DELTA),
        Case("tp2, short convolutions", tensor=2, llm="lfm2"),
        Case("ep2", shard=2, llm="qwen3_moe", pipeline={"expert": 2}),
        Case("cp2", shard=2, pipeline={"llm": {"context": 2}}),  # without a cache
    ],
    3: [
        Case("pp3", pipeline=PP3),
        Case("pp3, short convolutions", pipeline=PP3, llm="lfm2"),
        Disaggregated(unit(), unit(pipeline=2), composite="qwen3_vl"),
        Disaggregated(unit(), unit(tensor=2)),
    ],
    4: [
        Case("pp2 x fsdp2", shard=2, pipeline=PP2),
        Case("pp2 x tp2", tensor=2, sequence_parallel=True, pipeline=PP2),
        Case(
            "pp4", pipeline={"pipeline": 4, "schedule": "1f1b"}, llm_config={"num_hidden_layers": 8}
        ),
        Case("pp2 x replicate2, delta nets", replicate=2, pipeline=PP2, **DELTA),
        Case("fsdp2 x tp2", shard=2, tensor=2),
        Disaggregated(unit(shard=2), unit(shard=2)),
    ],
}


@pytest.mark.parametrize(
    ("ranks", "every"),
    [(2, 4), *(pytest.param(ranks, 1, marks=pytest.mark.campaign) for ranks in (2, 3, 4))],
)
def test_layouts_generate_text_of_one_process(ranks: int, every: int) -> None:
    for rank, results in enumerate(run_distributed(compare_all, ranks, ranks, every)):
        assert len(results) == len(CASES[ranks][::every])
        for case, problems in results:
            assert not problems, (rank, case, problems)


def compare_all(ranks: int, every: int) -> list[tuple[Case | Disaggregated, list[str]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    return [(case, compare(case)) for case in CASES[ranks][::every]]


def compare(case: Case | Disaggregated) -> list[str]:
    model, batch, config = parts_of(case)
    prompts = prompts_of(batch, 3)
    expected = on_first_rank(partial(reference, case, prompts))
    mesh = units_for(case.units) if isinstance(case, Disaggregated) else mesh_for(config)
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(config, descriptions, [m.meta for m in batch], mesh.units or None)
    stages = split_model_for_rank(model, layout, mesh.plan_rank)
    recompute = ActivationCheckpointConfig.model_validate(
        {"mode": "none" if isinstance(case, Disaggregated) else case.recompute}
    )
    names = [encoder.name for encoder in model.encoder_modules()]
    meshes = encoder_meshes(config, mesh, names)
    parallelize(model, mesh, config, recompute, CompileConfig(), torch.float32, meshes=meshes)
    filled(model).eval()
    pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32)
    return differences(pipeline, prompts, mesh, expected)


def parts_of(
    case: Case | Disaggregated,
) -> tuple[MultimodalModel, list[Microbatch], ParallelConfig]:
    if isinstance(case, Disaggregated):
        settings = {"placement": "disaggregated", "schedule": case.schedule, **case.parallel}
        model = a_model(False, case.freeze, case.composite)
        return model, a_batch(False, case.composite), ParallelConfig.model_validate(settings)
    settings = {
        "replicate": case.replicate,
        "shard": case.shard,
        "tensor": case.tensor,
        "sequence_parallel": case.sequence_parallel,
        **case.pipeline,
    }
    return case.model(), case.batch, ParallelConfig.model_validate(settings)


def reference(case: Case | Disaggregated, prompts: list[Microbatch]) -> Written:
    return written_again(filled(parts_of(case)[0]).eval(), prompts)
