"""What a component of a transformer layer can say about its costs; kinds are in `components.py`.

Shape suffix N: tasks.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar, NamedTuple

from torchmm.balance.costs.execution import Setting
from torchmm.balance.costs.operators import Operators
from torchmm.balance.costs.sizes import Array, TaskSizes
from torchmm.common.layers import LayerDescription

Linear = tuple[float, float]
"""(inputs, outputs) of a matrix product with weights."""


class Temporaries(NamedTuple):
    """What a component needs at one time beyond what is kept, bytes by task."""

    forward_N: Array | float
    backward_N: Array | float


class Component:
    """A component without weights that does nothing; kinds override what they have.

    Args:
        layer: sizes.
    """

    sublayer: ClassVar[bool] = False
    """Whether it is a branch of the residual stream, with a norm and an addition of its own."""
    reads_context: ClassVar[bool] = False
    """Whether its matrix products read a generator's context too."""
    splits_rest: ClassVar[bool] = False
    """Whether tensor-parallel ranks share the layer's parameters beyond matrix products."""

    def __init__(self, layer: LayerDescription) -> None:
        self.layer = layer

    @classmethod
    def is_in(cls, layer: LayerDescription) -> bool:
        """Whether a layer has this component."""
        return True

    def extra_readers(self) -> int:
        """Further products that read the same input as the first: backward adds their gradients."""
        return 0

    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of matrix products with weights, by what they are."""
        return {}

    def sharded_linears(self, tensor: int) -> dict[str, Linear]:
        """The same of the weights that a tensor-parallel rank has."""
        return {
            name: (inputs, outputs / tensor) for name, (inputs, outputs) in self.linears().items()
        }

    def local_linears(self, tensor: int) -> dict[str, Linear]:
        """The same of the products that a rank computes, where several may be made in one."""
        return self.sharded_linears(tensor)

    def replicated(self, tensor: int) -> tuple[str, ...]:
        """Linears whose weights every tensor-parallel rank has; their gradients are summed."""
        return ()

    def rows_N(self, name: str, sizes: TaskSizes) -> Array:
        """Positions that a linear is computed for."""
        return sizes.units_N

    def pair_flops_N(self, sizes: TaskSizes) -> Array | float:
        """Forward FLOPs of products between activations."""
        return 0.0

    def inner_norms(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Norms inside the component."""
        return Operators.none()

    def operators(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """What is run besides norms, linears, residual additions and tensor parallelism."""
        return Operators.none()

    def kept_bytes(self, sizes: TaskSizes, setting: Setting, weights: bool) -> Array | float:
        """What is kept for backward, besides the inputs of the layer, its norms and its linears.

        Args:
            weights: whether weights are trained.
        """
        return 0.0

    def kept_results_bytes(self, sizes: TaskSizes, setting: Setting) -> Array | float:
        """What selective recomputation keeps: the results of linears and attention."""
        rows = self.local_linears(setting.execution.tensor).items()
        results_N = sum(self.rows_N(name, sizes) * outputs for name, (_, outputs) in rows)
        return setting.element_bytes * results_N

    def temporaries(self, sizes: TaskSizes, setting: Setting) -> Temporaries:
        """What is needed beyond what is kept."""
        return Temporaries(0.0, 0.0)

    def flops_N(self, sizes: TaskSizes) -> Array | float:
        """Forward FLOPs of products with weights."""
        every = self.linears().items()
        return sum(2 * prod(size) * self.rows_N(name, sizes) for name, size in every)

    def exchange(self, sizes: TaskSizes, setting: Setting) -> Operators:
        """Sending tokens to the ranks that have their experts."""
        return Operators.none()

    def parameters(self, tensor: int) -> float:
        """Parameters of matrix products on one rank."""
        linears = self.linears()
        own = self.sharded_linears(tensor) | {n: linears[n] for n in self.replicated(tensor)}
        return sum(inputs * outputs for inputs, outputs in own.values())
