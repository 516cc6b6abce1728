"""Every parallel layout gives the loss and gradients of the unsharded single-process model."""

from dataclasses import dataclass, field

import pytest
import torch
from launch import run_distributed
from meshes import mesh_for
from microbatches import MODEL, VOCAB, random_microbatch
from model_cases import gradient_limit
from nf4_reference import round_to_nf4
from pipeline_cases import DELTA_NETS
from support.balanced_microbatches import balanced_microbatch
from torch.distributed.tensor import DTensor

from torchmm.balance.image_balancing import ImageBalancer
from torchmm.common.batch import Microbatch
from torchmm.extensions.low_precision.quantization import QuantizationConverter
from torchmm.models.build import build_model
from torchmm.models.hf.load import copy_slice
from torchmm.models.initialize import init_weights
from torchmm.models.layers import loss as loss_in_chunks
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.parallel import expert
from torchmm.parallel.apply import parallelize
from torchmm.parallel.exchange import data_parallel_feature_exchange
from torchmm.parallel.mesh import start_process_group
from torchmm.parallel.tensor import low_rank
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.recipe.model_section import AdapterConfig, FreezeConfig, ModelConfig
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import ActivationCheckpointConfig, CompileConfig
from torchmm.training.optim import global_grad_norm, group_by_replicas
from torchmm.training.pipeline import Pipeline, plan_layout
from torchmm.training.step import TrainStep

IMAGES = [2, 0, 3, 0, 0, 1, 2, 4]
"""Images in each sequence of the global batch.

Each replica has two sequences, and the batch has at least four. Some ranks have no images in a
microbatch.
"""


@dataclass(frozen=True)
class Case:
    """A parallel layout and model options."""

    name: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    freeze: tuple[str, ...] = ()
    images: tuple[int, ...] = tuple(IMAGES)
    tokens: int = 64
    pipeline: dict = field(default_factory=dict)
    """Additional keys of [parallel]."""
    llm: str = "qwen3"
    llm_config: dict = field(default_factory=dict)
    """Additional keys of the LLM config."""
    starves_experts: bool = False
    """Whether the router selects one expert per token, never from the second half."""
    chunked_loss: bool | None = False
    """Whether the loss is computed in chunks of tokens.

    None means only if the vocabulary is sharded. The reference computes all logits.
    """
    adapters: tuple[str, ...] = ()
    """Modules with an adapter."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers with an adapter."""
    method: str = "lora"
    """Method of the adapters."""
    balance: bool = False
    """Whether data-parallel ranks exchange images to encode."""
    compiled: bool = False
    quantized: bool = False
    """Whether modules with an adapter have 4-bit weights. The reference has the decoded weights."""

    @property
    def batch(self) -> list[Microbatch]:
        """Global batch."""
        sequences = max(4, 2 * self.replicate * self.shard)
        return [random_microbatch(i, n, self.tokens) for i, n in enumerate(self.images[:sequences])]

    def model(self) -> MultimodalModel:
        """Build the unsharded model on the meta device."""
        config = MODEL.model_dump()
        config["llm"]["config"]["model_type"] = self.llm
        config["llm"]["config"] |= CHANGES.get(self.llm, {})
        config["llm"]["config"] |= self.llm_config
        if self.starves_experts:
            config["llm"]["config"]["num_experts_per_tok"] = 1
        if self.quantized:
            config["llm"]["config"] |= WIDE_LLM
            config["encoders"]["vision"]["config"] |= WIDE_VISION
        config["chunked_loss"] = bool(self.chunked_loss)
        freeze = FreezeConfig(modules=list(self.freeze))
        adapters = {}
        if self.adapters:
            section = {"modules": list(self.adapters), "targets": list(self.targets), "rank": 3}
            section["method"] = self.method
            adapters["some"] = AdapterConfig.model_validate(section)
        model = build_model(ModelConfig.model_validate(config), freeze, adapters=adapters)
        if self.chunked_loss is None:
            model.llm.sharded_loss_chunk_targets = 7
        for module in model.modality_modules():
            for converter in self.converters:
                converter.annotate(module)
        return model

    @property
    def converters(self) -> list[QuantizationConverter]:
        """Converters of the model."""
        sections = {"quantization": {"quant_type": "nf4", "modules": list(self.adapters)}}
        recipe = Recipe.model_validate(sections if self.quantized else {})
        return [QuantizationConverter(recipe)] if self.quantized else []


WIDE_LLM = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
WIDE_VISION = {"hidden_size": 128, "intermediate_size": 128}
"""Sizes of which two tensor-parallel ranks have complete blocks of quantized weights."""
DELTA_KINDS = ["linear_attention", "full_attention", "linear_attention"]
CHANGES = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "output_router_logits": True,  # adds the load-balancing loss
        "router_aux_loss_coef": 0.5,
    },
    # Several layers have the type of the first layer, including in pipelines.
    "qwen3_5_text": {**DELTA_NETS, "layer_types": DELTA_KINDS},
    "qwen3_next": {
        **{k: v for k, v in DELTA_NETS.items() if k != "rope_parameters"},
        "layer_types": DELTA_KINDS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
}
"""Additional config keys by LLM."""
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero_bubble"}
CAPPED = {"final_logit_softcapping": 3.0, "sliding_window": 16}
PP2 = {"pipeline": 2, "schedule": "1f1b"}
WITH_CONNECTOR = ("llm", "vision", "vision.connector")
ASYNC = {"async_tensor_parallel": True}
EP2_PP2 = {"expert": 2, "pipeline": 2, "schedule": "1f1b"}
CASES_OF_4 = [
    Case("fsdp4", shard=4),
    Case("fsdp4, no image anywhere", shard=4, images=(0,) * 8),
    Case("hsdp 2x2", replicate=2, shard=2),
    Case("fsdp2 x tp2", shard=2, tensor=2),
    Case("replicate2 x tp2", replicate=2, tensor=2),
    Case("tp4, fewer kv heads than ranks", tensor=4),
    Case("fsdp2 x tp2, sequence parallel", shard=2, tensor=2, sequence_parallel=True),
    Case("tp4, sequence parallel", tensor=4, sequence_parallel=True),
    Case("fsdp2 x tp2, async", shard=2, tensor=2, sequence_parallel=True, pipeline=ASYNC),
    Case(
        "tp4, async, full recomputation, odd length",
        tensor=4,
        sequence_parallel=True,
        recompute="full",
        tokens=66,
        pipeline={**ASYNC, "async_tensor_chunks": 3},
    ),
    Case(
        "fsdp2 x tp2, async, LLM frozen",
        shard=2,
        tensor=2,
        sequence_parallel=True,
        freeze=("llm",),
        pipeline={**ASYNC, "async_tensor_backend": "collective"},
    ),
    Case("fsdp4, full recomputation", shard=4, recompute="full"),
    Case("fsdp2 x ep2", shard=4, llm="qwen3_moe", pipeline={"expert": 2}),
    Case(
        "fsdp2 x ep2, experts without tokens",
        shard=4,
        llm="qwen3_moe",
        pipeline={"expert": 2},
        starves_experts=True,
    ),
    Case(
        "fsdp2 x ep2, fewer experts than ranks",
        shard=4,
        llm="qwen3_moe",
        pipeline={"expert": 2},
        llm_config={"num_experts": 2, "num_experts_per_tok": 1},
    ),
    Case("ep4", shard=4, llm="qwen3_moe", pipeline={"expert": 4}),
    Case("hsdp 2 x ep2", replicate=2, shard=2, llm="qwen3_moe", pipeline={"expert": 2}),
    Case("pp2 x ep2", shard=2, llm="qwen3_moe", pipeline=EP2_PP2),
    Case(
        "pp2 x ep2, zero bubble",
        shard=2,
        llm="qwen3_moe",
        pipeline={**EP2_PP2, "schedule": "zero_bubble"},
    ),
    Case("fsdp2 x tp2, selective recomputation", shard=2, tensor=2, recompute="selective"),
    Case("fsdp2 x tp2, LLM frozen", shard=2, tensor=2, freeze=("llm",)),
    Case("fsdp4, tower and LLM frozen", shard=4, freeze=("vision", "llm")),
    Case("hsdp 2x2, tower frozen", replicate=2, shard=2, freeze=("vision",)),
    Case("fsdp2 x tp2, loss in chunks", shard=2, tensor=2, chunked_loss=True),
    Case(
        "tp4, sequence parallel, loss in chunks",
        tensor=4,
        sequence_parallel=True,
        chunked_loss=True,
    ),
    Case(
        "pp2 x fsdp2, zero bubble, loss in chunks", shard=2, pipeline=ZERO_BUBBLE, chunked_loss=True
    ),
    Case(
        "pp2 x tp2, zero bubble, loss in chunks", tensor=2, pipeline=ZERO_BUBBLE, chunked_loss=True
    ),
    Case(
        "tp4, sequence parallel, fewer kv heads than ranks, adapters",
        tensor=4,
        sequence_parallel=True,
        adapters=("llm", "vision"),
    ),
    Case(
        "fsdp2 x tp2, sequence parallel, full recomputation, adapters",
        shard=2,
        tensor=2,
        sequence_parallel=True,
        recompute="full",
        adapters=("llm", "vision"),
    ),
    Case(
        "pp2 x tp2, zero bubble, adapters",
        tensor=2,
        pipeline=ZERO_BUBBLE,
        adapters=("llm", "vision"),
    ),
    Case("pp2 x ep2, adapter", shard=2, llm="qwen3_moe", pipeline=EP2_PP2, adapters=("llm",)),
    Case(
        "tp4, sequence parallel, fewer kv heads than ranks, DoRA",
        tensor=4,
        sequence_parallel=True,
        adapters=("llm", "vision"),
        method="dora",
    ),
    Case(
        "fsdp2 x tp2, full recomputation, DoRA",
        shard=2,
        tensor=2,
        recompute="full",
        adapters=("llm", "vision"),
        method="dora",
    ),
    Case(
        "pp2 x tp2, zero bubble, DoRA",
        tensor=2,
        pipeline=ZERO_BUBBLE,
        adapters=("llm", "vision"),
        method="dora",
    ),
    Case(
        "fsdp2 x tp2, sequence parallel, full recomputation, adapters with the connector",
        shard=2,
        tensor=2,
        sequence_parallel=True,
        recompute="full",
        adapters=WITH_CONNECTOR,
    ),
    Case("pp2 x fsdp2, adapters with the connector", 1, 2, pipeline=PP2, adapters=WITH_CONNECTOR),
]
CASES_OF_2 = [
    Case("fsdp2", shard=2),
    Case("tp2", tensor=2),
    Case("tp2, sequence parallel", tensor=2, sequence_parallel=True),
    Case("tp2, sequence parallel, odd length", tensor=2, sequence_parallel=True, tokens=65),
    Case("tp2, async, odd length", tensor=2, sequence_parallel=True, tokens=65, pipeline=ASYNC),
    Case(
        "tp2, async, selective recomputation",
        tensor=2,
        sequence_parallel=True,
        recompute="selective",
        pipeline=ASYNC,
    ),
    Case("tp2, biases", tensor=2, llm="starcoder2"),
    Case("fsdp2, experts", shard=2, llm="qwen3_moe"),
    Case("ep2", shard=2, llm="qwen3_moe", pipeline={"expert": 2}),
    Case(
        "ep2, full recomputation, experts without tokens",
        shard=2,
        recompute="full",
        llm="qwen3_moe",
        pipeline={"expert": 2},
        starves_experts=True,
    ),
    Case("ep2, LLM frozen", shard=2, llm="qwen3_moe", pipeline={"expert": 2}, freeze=("llm",)),
    Case("tp2, experts", tensor=2, sequence_parallel=True, recompute="full", llm="qwen3_moe"),
    Case("pp2, experts", llm="qwen3_moe", pipeline={"pipeline": 2, "schedule": "1f1b"}),
    Case("tp2, sequence parallel, biases", tensor=2, sequence_parallel=True, llm="starcoder2"),
    Case("fsdp2, loss in chunks", shard=2, chunked_loss=True),
    Case("tp2, loss in chunks", tensor=2, chunked_loss=True),
    Case("tp2, sharded loss in chunks", tensor=2, chunked_loss=None),
    Case(
        "tp2, loss in chunks with an uneven vocabulary",
        tensor=2,
        llm_config={"vocab_size": VOCAB + 1},
        chunked_loss=True,
    ),
    Case(
        "tp2, capped loss in chunks", tensor=2, llm="gemma2", llm_config=CAPPED, chunked_loss=True
    ),
    Case("fsdp2, LLM frozen, loss in chunks", shard=2, freeze=("llm",), chunked_loss=True),
    Case("tp2, LLM frozen, loss in chunks", tensor=2, freeze=("llm",), chunked_loss=True),
    Case("pp2, zero bubble, loss in chunks", pipeline=ZERO_BUBBLE, chunked_loss=True),
    Case("fsdp2, adapter of the LLM", shard=2, adapters=("llm",)),
    Case("tp2, adapters of all modules", tensor=2, adapters=("llm", "vision")),
    Case(
        "tp2, sequence parallel, adapter of the LLM, odd length",
        tensor=2,
        sequence_parallel=True,
        tokens=65,
        adapters=("llm",),
    ),
    Case("tp2, biases, adapter of the LLM", tensor=2, llm="starcoder2", adapters=("llm",)),
    Case(
        "tp2, packed linears, adapter",
        tensor=2,
        llm="phi3",
        llm_config={"pad_token_id": 0},
        adapters=("llm",),
    ),
    Case("fsdp2, DoRA of the LLM", shard=2, adapters=("llm",), method="dora"),
    Case(
        "tp2, sequence parallel, biases, DoRA, selective recomputation",
        tensor=2,
        sequence_parallel=True,
        recompute="selective",
        llm="starcoder2",
        adapters=("llm", "vision"),
        method="dora",
    ),
    Case(
        "tp2, packed linears, DoRA",
        tensor=2,
        llm="phi3",
        llm_config={"pad_token_id": 0},
        adapters=("llm",),
        method="dora",
    ),
    Case("pp2, zero bubble, adapters", pipeline=ZERO_BUBBLE, adapters=("llm", "vision")),
    Case(
        "pp2, zero bubble, adapter of queries, tower frozen",
        pipeline=ZERO_BUBBLE,
        adapters=("llm",),
        targets=("q_proj",),
        freeze=("vision", "vision.connector"),
    ),
    Case("fsdp2, adapter of the connector", shard=2, adapters=("vision.connector",)),
    Case("tp2, adapter of the connector", tensor=2, adapters=("vision.connector",)),
    Case("tp2, DoRA with the connector", tensor=2, adapters=WITH_CONNECTOR, method="dora"),
    Case(
        "pp2, zero bubble, adapters with the connector",
        pipeline=ZERO_BUBBLE,
        adapters=WITH_CONNECTOR,
    ),
    Case(
        "pp2, adapter of the connector alone",
        freeze=("vision", "llm"),
        pipeline=PP2,
        adapters=("vision.connector",),
    ),
]


BOTH = ("llm", "vision")
QUANTIZED_CASES = [
    Case("fsdp2, nf4", shard=2, adapters=BOTH, quantized=True),
    Case("tp2, nf4", tensor=2, adapters=BOTH, quantized=True),
    Case("tp2, sequence parallel, nf4", 1, 1, 2, True, adapters=BOTH, quantized=True),
    Case(
        "tp2, packed linears, nf4",
        tensor=2,
        llm="phi3",
        llm_config={"pad_token_id": 0},
        adapters=("llm",),
        quantized=True,
    ),
    Case("tp2, biases, nf4", tensor=2, llm="starcoder2", adapters=("llm",), quantized=True),
    Case("pp2, nf4", pipeline=PP2, adapters=BOTH, quantized=True),
    Case("pp2, zero bubble, nf4", pipeline=ZERO_BUBBLE, adapters=BOTH, quantized=True),
    Case("fsdp2, full, nf4", shard=2, recompute="full", adapters=BOTH, quantized=True),
    Case("fsdp2, selective, nf4", shard=2, recompute="selective", adapters=BOTH, quantized=True),
    Case("fsdp2, compiled, nf4", shard=2, compiled=True, adapters=("llm",), quantized=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, CASES_OF_2[::4]),
        pytest.param(2, [c for i, c in enumerate(CASES_OF_2) if i % 4], marks=pytest.mark.campaign),
        pytest.param(4, CASES_OF_4, marks=pytest.mark.campaign),
    ],
)
def test_layouts_equal_single_process(ranks, cases):
    for outcomes in zip(*run_distributed(compare_all, ranks, cases), strict=True):
        for name, loss_error, norm_error, gradient_errors in outcomes:
            assert loss_error <= 1e-5, (name, loss_error)
            assert norm_error <= 1e-5, (name, norm_error)
            assert gradient_errors == {}, (name, gradient_errors)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_quantized_layouts_equal_decoded_weights(part: int) -> None:
    cases = QUANTIZED_CASES[part::2]
    for outcomes in zip(*run_distributed(compare_all, 2, cases), strict=True):
        for name, loss_error, norm_error, gradient_errors in outcomes:
            assert loss_error <= 1e-5, (name, loss_error)
            assert norm_error <= 1e-5, (name, norm_error)
            assert gradient_errors == {}, (name, gradient_errors)


@pytest.mark.slow
def test_quantized_model_differs_from_full_weights() -> None:
    for outcomes in run_distributed(_compare_with_full_weights, 2):
        for _, loss_error, _, gradient_errors in outcomes:
            assert loss_error > 1e-4
            assert any(name.endswith("q_proj.lora.down") for name in gradient_errors)


def _compare_with_full_weights() -> list[tuple[str, float, float, dict[str, float]]]:
    globals()["_round_weights"] = lambda model: None
    return compare_all(QUANTIZED_CASES[:1])


def test_exchange_to_wrong_experts_changes_gradients():
    for outcomes in run_distributed(_compare_with_wrong_experts, 2):
        for _, _, _, gradient_errors in outcomes:
            assert any("experts" in name for name in gradient_errors)


def _compare_with_wrong_experts() -> list[tuple[str, float, float, dict[str, float]]]:
    original = expert._exchange_counts

    def shifted(expert_S, experts, group):
        counts, arriving_R = original(expert_S, experts, group)
        return counts, (arriving_R + 1) % experts

    expert._exchange_counts = shifted
    return compare_all([case for case in CASES_OF_2 if case.name == "ep2"])


def test_unsummed_adapter_gradients_differ():
    for outcomes in run_distributed(_compare_without_sums, 2):
        (_, _, _, layer_errors), (_, _, _, connector_errors) = outcomes
        assert any(name.endswith("q_proj.lora.down") for name in layer_errors)
        assert any(name.endswith("o_proj.lora.up") for name in layer_errors)
        assert "encoders.vision.connector.linear_1.lora.down" in connector_errors
        assert "encoders.vision.connector.linear_2.lora.up" in connector_errors


def _compare_without_sums() -> list[tuple[str, float, float, dict[str, float]]]:
    low_rank._local_summed = low_rank._local
    names = ("tp2, adapters of all modules", "tp2, adapter of the connector")
    return compare_all([c for c in CASES_OF_2 if c.name in names])


def test_local_dora_norms_change_loss():
    for outcomes in run_distributed(_compare_with_local_norms, 2):
        for _, loss_error, _, _ in outcomes:
            assert loss_error > 1e-4


def _compare_with_local_norms() -> list[tuple[str, float, float, dict[str, float]]]:
    low_rank._sum = lambda mesh, local: local
    return compare_all([c for c in CASES_OF_2 if c.tensor == 2 and c.method == "dora"])


def compare_all(cases: list[Case]) -> list[tuple[str, float, float, dict[str, float]]]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), torch.device("cpu"))
    return [_compare(case) for case in cases]


def _compare(case: Case) -> tuple[str, float, float, dict[str, float]]:
    batch = case.batch
    targets = sum(m.target_count for m in batch)
    loss_in_chunks._ROWS = 7  # several chunks
    reference, loss = _reference(case, batch, targets)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}

    config = ParallelConfig(
        replicate=case.replicate,
        shard=case.shard,
        tensor=case.tensor,
        sequence_parallel=case.sequence_parallel,
        **case.pipeline,
    )
    mesh = mesh_for(config)
    model = case.model()
    descriptions = [module.describe() for module in model.modality_modules()]
    layout = plan_layout(config, descriptions, [m.meta for m in batch])
    stages = split_model_for_rank(model, layout, mesh.plan_rank)
    for converter in case.converters:
        for module in model.all_stages():
            converter.convert(module)
    for stage in stages.values():
        assert stage.name != "llm" or stage.loss_chunk_targets == 7 * bool(case.chunked_loss)
        assert stage.name != "llm" or stage.sharded_loss_chunk_targets == 7 * (
            case.chunked_loss is None
        )
    recompute = ActivationCheckpointConfig(mode=case.recompute)
    compiles = CompileConfig(enabled=case.compiled, backend="aot_eager")
    parallelize(model, mesh, config, recompute, compiles, torch.float32)
    materialize(model, "cpu")
    init_weights(model, seed=1)
    _starve_experts(model, case)
    _randomize_adapters(model)
    exchange = data_parallel_feature_exchange(mesh) if case.balance else None
    pipeline = Pipeline(model, stages, layout, descriptions, config, mesh, torch.float32, exchange)
    rank, ranks = mesh.data_parallel_rank, mesh.data_parallel_size
    share = batch[rank::ranks]
    if case.balance:
        balance = ImageBalancer(tuple(m for m in descriptions if m.kind == "encoder"))
        share = [
            balanced_microbatch(batch[first : first + ranks], balance, rank)
            for first in range(0, len(batch), ranks)
        ]
    local_loss = TrainStep(pipeline, mesh).run(pipeline.plan_training(share), share, targets).loss
    # One pipeline rank has the loss, and context-parallel ranks have partial sums of it.
    copies = mesh.plan_size * mesh.context_size
    total_loss = mesh.sum_over_data_parallel([local_loss.item() * copies])[0]
    norm = global_grad_norm(group_by_replicas(model), mesh).item()

    expected_norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    errors = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, f"{case.name}: frozen {name} has a gradient"
            continue
        original = model.tied_replicas().get(name, name)
        error = _relative_error(_full(parameter.grad), expected.pop(original), expected_norm)
        if not error <= gradient_limit(name):
            errors[name] = error
    if mesh.plan_size == 1:
        assert not expected, f"{case.name}: parameters {sorted(expected)} are missing"
    return case.name, abs(total_loss / loss - 1), abs(norm / expected_norm - 1), errors


def _reference(case: Case, batch: list[Microbatch], targets: int) -> tuple[MultimodalModel, float]:
    model = case.model()
    model.llm.loss_chunk_targets = 0
    materialize(model, "cpu")
    init_weights(model, seed=1)
    _round_weights(model)
    _starve_experts(model, case)
    _randomize_adapters(model)
    if model.llm.balance is not None:
        model.llm.balance.scale = 1 / sum(len(m.input_ids_T) for m in batch)
    total = 0.0
    for microbatch in batch:
        loss = model(microbatch) / targets
        loss.backward()
        total += loss.item()
    return model, total


@torch.no_grad()
def _round_weights(model: MultimodalModel) -> None:
    """Round the weights that other layouts quantize."""
    for module in model.modality_modules():
        for name in module.weight_formats:
            weight = module.get_parameter(f"{name}.weight")
            weight.copy_(round_to_nf4(weight))


@torch.no_grad()
def _starve_experts(model: MultimodalModel, case: Case) -> None:
    """Give no tokens to the second half of the experts.

    Their router weights are the mean of the other router weights, which is never the largest.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight") and case.starves_experts:
            full_ED = _full(parameter).clone()
            half = len(full_ED) // 2
            full_ED[half:] = full_ED[:half].mean(0)
            copy_slice(parameter, full_ED)


@torch.no_grad()
def _randomize_adapters(model: MultimodalModel) -> None:
    """Set the second factors of adapters, which are initially zero, to random values.

    With zero factors, gradients of the first factors would be zero.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("lora.up"):
            generator = torch.Generator().manual_seed(len(name) + 7 * sum(map(ord, name)))
            copy_slice(parameter, 0.01 * torch.randn(parameter.shape, generator=generator))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Return the relative error.

    Gradients of key biases are zero except for rounding. Their errors are relative to `scale`.
    """
    size = expected.norm().item()
    return (actual - expected).norm().item() / (size if size > 1e-6 * scale else scale)
