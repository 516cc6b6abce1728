"""The base class of generators: modules after the LLM that generate images or videos.

A generator reads the hidden states of the LLM at the context tokens of each image. The extension
"generation" has one, a diffusion transformer. The core runs, cuts, shards, exports and saves a
generator through this class and `LayeredModule`.

Shape legend: N images, A patches of all images, V values of a patch, X pixel values of a patch,
K context tokens of all images, D features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchmm.common.generated import GeneratedMeta, GeneratorInputs, GeneratorSpec
from torchmm.common.module_names import GENERATOR
from torchmm.models.layered import LayeredModule, WeightFiles

MessageShapes = Callable[[Sequence[GeneratedMeta]], list[tuple[int, ...]]]
"""Maps images to the shapes of the tensors that one generator stage sends to the next.

Other processes receive it, so it must be picklable.
"""


class GeneratorModule(LayeredModule):
    """A generator with its connector from the LLM.

    Attributes:
        images: sizes, noise and times of the images to generate.
        llm_hidden_size: features of a context token before the connector.
    """

    kind = "generator"
    forward_methods = ("velocity", "decode_latents")

    def __init__(self, weights: WeightFiles, images: GeneratorSpec, llm_hidden_size: int) -> None:
        super().__init__(GENERATOR, weights)
        self.images = images
        self.llm_hidden_size = llm_hidden_size

    @abstractmethod
    def forward(
        self, inputs: GeneratorInputs, stage_input: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Run this stage.

        Args:
            inputs: Images. Later stages read only their sizes, the last also pixels and noise.
            stage_input: First stage: hidden states of the LLM (K, D) at the context tokens. Later
                stages: output of the previous stage.

        Returns:
            Last stage: float32 scalar, the sum of the losses of all images. Earlier stages: the
            tensors that the next stage needs. None replaces a tensor that is not sent.
        """

    @abstractmethod
    def velocity(self, inputs: GeneratorInputs, stage_input: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return float32 (A, V), the predicted velocities. Only the last stage is called.

        The velocity is the direction from pixels (or latents) to noise.
        """

    @abstractmethod
    def decode_latents(
        self, inputs: GeneratorInputs, stage_input: Tensor | tuple[Tensor, ...]
    ) -> Tensor:
        """Return float32 (A, X), the decoded pixels after the last denoising step of latents.

        Only the last stage is called.

        Args:
            inputs: Images whose patches and noise are both the noisy latents.
            stage_input: As in `forward`.
        """

    @abstractmethod
    def dummy_inputs(self, device: torch.device) -> GeneratorInputs:
        """Return the image for microbatches without images, excluded from the loss."""

    @abstractmethod
    def message_shapes(self) -> MessageShapes:
        """Return the function that computes the shapes of messages between stages."""

    @abstractmethod
    def messages_without_gradients(self) -> frozenset[int]:
        """Return the indices of the tensors of a message that have no gradient."""

    @abstractmethod
    def hf_models(self) -> dict[str, tuple[Any, WeightFiles]]:
        """Return the models to export, by subdirectory of the export, without weights.

        The weights have the names of `hf_prefixes` of the `WeightFiles`.
        """

    @abstractmethod
    def save_settings(self, directory: Path) -> None:
        """Save the files of the export that have no weights."""

    @abstractmethod
    def describe_export(self) -> dict[str, Any]:
        """Return the keys of `[model.generator]` that load the export again."""
