"""Tensor parallelism: structured layers divided among processes by outputs or by inputs, as DTensors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from buttress import ops
from buttress.core.partition import Division, Partition, Side, partition
from buttress.errors import ChainError, StructureError
from buttress.nn.linear import StructuredLinear
from buttress.ops.dividing import part_of


class ColumnParallel(ColwiseParallel):
    """Divides a layer's outputs among processes, for torch's `parallelize_module`; nn.Linear as ColwiseParallel does.

    Each process computes a contiguous part of the outputs from the whole input, without communication.

    Args:
        input_layouts: Placement of the input. Default: every process has it.
        output_layouts: Placement of the output. Default: each process has its part.
        use_local_output: Whether the output is a plain tensor.

    Raises:
        StructureError: When it is applied to a structured layer that cannot be divided, or that shares its factors
            with another module.

    Example:
        >>> parallelize_module(block, mesh, {"up": ColumnParallel(), "down": RowParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, StructuredLinear):
            return super()._apply(module, device_mesh)
        return _distributed(self, module, device_mesh, "outputs", Replicate())


class RowParallel(RowwiseParallel):
    """Divides a layer's inputs among processes, for torch's `parallelize_module`; nn.Linear as RowwiseParallel does.

    Each process reads a contiguous part of the inputs, as a layer with `ColumnParallel` returns it. The results are
    added up at the end.

    Args:
        input_layouts: Placement of the input. Default: each process has its part.
        output_layouts: Placement of the output. Default: every process has it.
        use_local_output: Whether the output is a plain tensor.

    Raises:
        StructureError: When it is applied to a structured layer that cannot be divided, or that shares its factors
            with another module.

    Example:
        >>> parallelize_module(block, mesh, {"up": ColumnParallel(), "down": RowParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, StructuredLinear):
            return super()._apply(module, device_mesh)
        return _distributed(self, module, device_mesh, "inputs", Shard(-1))


def _distributed(
    style: ColwiseParallel | RowwiseParallel, module: StructuredLinear, mesh: DeviceMesh, side: Side, needed: Placement
) -> nn.Module:
    """Make a layer's parameters DTensors, and its computation that of one process."""
    processes = mesh.size()
    if module.multiply is not None:
        raise StructureError(f"{module.structure} is divided among processes already: parallelize a layer once")
    try:
        own = partition(module.chain, side, processes)
    except ChainError as error:
        raise StructureError(
            f"{module.structure} {module.in_features} -> {module.out_features} cannot be divided by {side} among "
            f"{processes} processes: {error}. Choose another structure, split or number of processes, or leave the "
            "layer out"
        ) from None
    if _is_tied(module):
        raise StructureError(
            f"{module.structure} {module.in_features} -> {module.out_features} shares its factors with another module, "
            "such as an embedding, and divided factors could not be shared: leave the layer out, or untie it first by "
            "a copy (model.head = copy.deepcopy(model.head))"
        )
    ops.prepare(own.chain)

    def place(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=style.src_data_rank)
        return nn.Parameter(whole, parameter.requires_grad)

    for name, division in own.divisions.items():
        module.factors[name] = place(module.factors[name], _placement(division))
    for name, gain in list(module.gains.items()):
        module.gains[name] = place(gain, Replicate())
    if module.bias is not None:
        module.bias = place(module.bias, Shard(0) if side == "outputs" else Replicate())
    module.multiply = _Multiply(module, own, mesh, side)

    def placed_input(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, style.input_layouts, run_check=False)
        return x.redistribute(placements=[needed])

    def placed_output(_: nn.Module, y: DTensor, mesh: DeviceMesh) -> Any:
        y = y.redistribute(placements=style.output_layouts)
        return y.to_local() if style.use_local_output else y

    return distribute_module(module, mesh, None, placed_input, placed_output)


def _is_tied(layer: StructuredLinear) -> bool:
    """Whether another module holds a factor or gain of a layer.

    A style receives one layer and not the model, so what refers to a parameter is looked up among all objects. That
    takes long, and is left out where nothing but the layer itself refers to it.
    """
    alone = _references(nn.ParameterDict({"p": nn.Parameter(torch.empty(0))}), "p")
    held = [(d, name) for d in (layer.factors, layer.gains) for name in d]
    suspects = [d[name] for d, name in held if _references(d, name) > alone]
    own = {id(layer.factors._parameters), id(layer.gains._parameters)}
    return bool(suspects) and any(
        id(found) not in own and _is_of_a_module(found) for found in _dicts(gc.get_referrers(*suspects))
    )


def _references(held: nn.ParameterDict, name: str) -> int:
    return sys.getrefcount(held[name])


def _dicts(objects: list[Any]) -> Iterator[dict[str, Any]]:
    return (found for found in objects if type(found) is dict)


def _is_of_a_module(parameters: dict[str, Any]) -> bool:
    """Whether a dict is where a module keeps its parameters, and not one of a caller's."""
    referrers = gc.get_referrers(parameters)
    attributes = [*_dicts(referrers), *(vars(found) for found in referrers if isinstance(found, nn.Module))]
    return any(found.get("_parameters") is parameters for found in attributes)


def _placement(division: Division | None) -> Placement:
    """A factor whose parts are not contiguous is stored as a whole, and its part is taken when it is used."""
    return Replicate() if division is None or division.before > 1 else Shard(division.dim)


class _Multiply:
    """The product with one process's part of the matrix."""

    def __init__(self, layer: StructuredLinear, own: Partition, mesh: DeviceMesh, side: Side) -> None:
        self.layer = layer
        self.own = own
        self.mesh = mesh
        self.side = side

    def __deepcopy__(self, memo: dict[int, Any]) -> _Multiply:
        return _Multiply(memo.get(id(self.layer), self.layer), self.own, self.mesh, self.side)

    def __call__(self, x: Any) -> DTensor:
        """`x` is a DTensor with the placement that the style asks for, and so is the result."""
        by_outputs = self.side == "outputs"
        # Each process has its own part of the gradient of an input that all of them read.
        own_x = x.to_local(grad_placements=[Partial()] if by_outputs else None)
        y = ops.apply(
            self.own.chain,
            own_x,
            [self._factor(name, division) for name, division in self.own.divisions.items()],
            self._bias(),
            scales=self._scales() if self.layer.normalize else None,
            recompute=self.layer.recompute,
            activation=self.layer.input_activation,
        )
        return DTensor.from_local(y, self.mesh, [Shard(-1) if by_outputs else Partial()], run_check=False)

    def _factor(self, name: str, division: Division | None) -> Tensor:
        stored = self.layer.factors[name]
        if isinstance(_placement(division), Shard):
            return _local(stored)
        return part_of(_replicated(stored), division, self.mesh.get_local_rank(), self.mesh.size())

    def _bias(self) -> Tensor | None:
        bias = self.layer.bias
        if bias is None or self.side == "outputs":
            return None if bias is None else _local(bias)
        # Once in the sum. All processes take part, because its gradient is added up over them.
        return _replicated(bias) * (1.0 if self.mesh.get_local_rank() == 0 else 0.0)

    def _scales(self) -> list[Tensor]:
        """As `Structured.scales`, with the mean square over the whole factor."""
        return [_replicated(self.layer.gains[name]) * self._normalizer(name) for name in self.own.divisions]

    def _normalizer(self, name: str) -> Tensor:
        stored = self.layer.factors[name]
        local = _local(stored) if _is_divided(stored) else _replicated(stored)
        wide = local.to(torch.promote_types(local.dtype, torch.float32))
        total = wide.square().sum().reshape(1)
        if _is_divided(stored):
            summed = DTensor.from_local(total, self.mesh, [Partial()], run_check=False).redistribute(
                placements=[Replicate()]
            )
            total = summed.to_local(grad_placements=[Partial()])
        return torch.rsqrt((total / stored.numel() / self.layer.stds[name] ** 2).clamp(min=1.0))


def _is_divided(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements[0].is_shard()


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _replicated(parameter: Tensor) -> Tensor:
    """A tensor that every process has; its gradient is the sum of what the processes compute."""
    assert isinstance(parameter, DTensor)
    again = DTensor.from_local(
        parameter.to_local(), parameter.device_mesh, parameter.placements, run_check=False
    )  # its backward adds up
    return again.to_local(grad_placements=[Partial()])
