"""Build the model of a run: on the meta device, split into stages, parallelized, initialized.

`build_meta_model` and `choose_model_stages` require no process group, so that all problems with the
model are reported before the rendezvous of the ranks. `materialize_stages` then allocates only the
parameters of this rank.
"""

from __future__ import annotations

import logging
import warnings
from typing import NamedTuple

import datasets
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import MicrobatchMeta
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError
from torchmm.common.extensions import find_entries
from torchmm.common.log import report_progress
from torchmm.common.module_names import LLM
from torchmm.data.media.preprocessors import open_media
from torchmm.data.tokenizer import load_tokenizer
from torchmm.models.hf.adapter_files import load_adapters
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.layers.loss import LossTerms
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.source_losses import SourceLosses
from torchmm.parallel.apply import model_problems, parallelize
from torchmm.parallel.compilation import Compilation
from torchmm.parallel.context import stage_boundary_problems
from torchmm.parallel.exchange import data_parallel_feature_exchange
from torchmm.parallel.mesh import ParallelMesh, encoder_meshes
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.planning.choices import choose_segments
from torchmm.planning.converters import find_converters
from torchmm.planning.executions import module_executions
from torchmm.planning.first_step import read_first_step
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.planning.step import plan_layout
from torchmm.recipe.data_section import unique_names
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.optimizers.optimizer import find_optimizer
from torchmm.training.pipeline import Pipeline


class ModelStages(NamedTuple):
    """Stages of a model, identical on all ranks."""

    parallel: ParallelConfig
    """[parallel] with the segments that the recipe does not set."""
    layout: StageLayout


def build_meta_model(run: ResolvedRecipe) -> tuple[MultimodalModel, PreTrainedTokenizerBase]:
    """Return the model on the meta device and its tokenizer. Requires no process group.

    Raises:
        ConfigError: The model or the tokenizer cannot be built. The error lists all problems.
    """
    _silence_libraries()
    recipe = run.recipe
    problems: list[str] = []
    if not recipe.data.sources and not recipe.data.validation:
        problems.append(
            "data.sources: there is no training data, because the recipe only describes a "
            "simulation; add a [[data.sources]] table"
        )
    model = tokenizer = None
    try:
        model = recipe_model(recipe, DTYPES[recipe.training.parameter_dtype])
    except ConfigError as error:
        problems += error.problems
    try:
        tokenizer = load_tokenizer(recipe.model)
    except ConfigError as error:
        problems += error.problems
    if model is None or tokenizer is None or problems:
        raise ConfigError(problems)
    dtype = DTYPES[recipe.training.parameter_dtype]
    wide = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype != dtype]
    if wide:  # FSDP2 requires one dtype for all trained parameters of a layer
        raise ConfigError(
            f'training.parameter_dtype = "{recipe.training.parameter_dtype}": Hugging Face '
            f'keeps {wide[0]} in float32; freeze the module, or use "float32"'
        )
    specs = model.sample_specs(tokenizer)  # raises if model and tokenizer do not match
    for spec in specs["image_specs"].values():
        open_media(spec, recipe.data.max_image_pixels)
    return model, tokenizer


@report_progress("measuring the first samples, and splitting the model")
def choose_model_stages(
    run: ResolvedRecipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> ModelStages:
    """Check the model against the parallelism of the recipe and return its stages.

    Requires no process group. `torchmm.recipe.check` has checked the recipe alone. This function
    checks model-dependent settings, such as attention heads, experts and tied weights.

    Args:
        run: Resolved recipe.
        model: Complete model on the meta device.
        tokenizer: Tokenizer of the model.
        device: Device of the run.

    Raises:
        ConfigError: All reasons why the model cannot be parallelized.
        DataError: The samples of the first step cannot be read.
    """
    recipe = run.recipe
    modules = list(model.modality_modules())
    descriptions = [module.describe() for module in modules]
    executions = module_executions(run, descriptions, device.type)
    tensor = {name: execution.tensor for name, execution in executions.items()}
    problems = model_problems(
        model, recipe.parallel, tensor, recipe.training.attention, recipe.compile, device
    )
    is_narrow = recipe.training.parameter_dtype != "float32"
    optimizer = find_optimizer(recipe.optimizer, is_narrow=is_narrow)
    for module in descriptions:
        problems += optimizer.find_problems(recipe.optimizer, module, tensor[module.name])
    for converter in find_converters(recipe):
        problems += converter.find_problems(modules, device, tensor)
    if problems:
        raise ConfigError(problems)
    # A resumed run also reads the samples of step 1, so that it has the same stages as before.
    microbatches_by_share = (
        read_first_step(recipe, model, tokenizer, run.data_parallel_size)
        if run.is_pipelined
        else []
    )
    microbatches_by_share = microbatches_by_share or [
        [MicrobatchMeta((), recipe.training.sequence_length)]
    ]
    parallel = choose_segments(run, model, tokenizer, microbatches_by_share, device)
    microbatches = [meta for group in microbatches_by_share for meta in group]
    layout = plan_layout(parallel, descriptions, microbatches, run.units or None)
    stops = [stage.stop for stage in layout.stages if stage.module == LLM]
    if problems := stage_boundary_problems(model.llm, parallel.context, stops[:-1]):
        raise ConfigError(problems)
    return ModelStages(parallel, layout)


@report_progress("splitting the model and loading weights")
def materialize_stages(
    run: ResolvedRecipe, model: MultimodalModel, mesh: ParallelMesh, model_stages: ModelStages
) -> tuple[Pipeline, Compilation]:
    """Parallelize the stages of this rank, then allocate and load their parameters. Collective.

    Functions of the table "loaded_models" receive the resolved recipe, the model and the pipeline.
    They run before a checkpoint is loaded, so that the parameters have their initial values.

    Returns:
        The pipeline of this rank and its compiled layers.
    """
    recipe = run.recipe
    training = recipe.training
    dtype = DTYPES[training.dtype]
    descriptions = [module.describe() for module in model.modality_modules()]
    encoders = [module.name for module in descriptions if module.kind == "encoder"]
    stages = split_model_for_rank(model, model_stages.layout, mesh.plan_rank)
    for converter in find_converters(recipe):
        for module in model.all_stages():
            converter.convert(module)
    compilation = parallelize(
        model,
        mesh,
        recipe.parallel,
        recipe.activation_checkpoint,
        recipe.compile,
        dtype,
        training.microbatch_size * training.sequence_length,
        meshes=encoder_meshes(recipe.parallel, mesh, encoders),
    )
    materialize(model, mesh.device)
    sources = {name: a.source for name, a in recipe.adapters.items() if a.source is not None}
    filled = load_weights(model) | load_adapters(model, sources)
    init_weights(model, training.seed, skip=filled)
    exchange = data_parallel_feature_exchange(mesh) if recipe.data.balance == "images" else None
    pipeline = Pipeline(
        model,
        stages,
        model_stages.layout,
        descriptions,
        model_stages.parallel,
        mesh,
        dtype,
        exchange,
    )
    for entry in find_entries("loaded_models"):
        if entry.is_used(run):
            entry.load()(run, model, pipeline)
    return pipeline, compilation


def set_training_losses(model: MultimodalModel, run: ResolvedRecipe) -> None:
    """Set what the LLM adds to the loss, and the data sources of which it records losses."""
    training = run.recipe.training
    model.llm.source_losses = SourceLosses(unique_names(run.recipe.data.sources))
    model.llm.loss_terms = LossTerms(training.label_smoothing, training.z_loss)


def _silence_libraries() -> None:
    """Disable harmless messages of libraries that every rank would repeat."""
    # torchmm does not modify the result of a module in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Norms over a 2-D mesh are reduced one dimension after another. This is one scalar per step.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # The replacement of this collective is not available in the oldest supported torch.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor. is deprecated")
    datasets.disable_progress_bars()
    # Pillow prepares the images, so torchvision is not required.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
