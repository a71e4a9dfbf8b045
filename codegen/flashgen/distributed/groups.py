"""Ranks: the process groups of a call, from ``group=`` or ``mesh=``, and the names by which operators of
PyTorch's graphs hold them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashgen.errors import BadParam, DeviceTypeNotSupported, arg

if TYPE_CHECKING:
    from torch import Tensor


class Names(NamedTuple):
    """The names of the groups of a call: ``outer`` gathers keys and values, ``inner`` exchanges heads; empty
    where the call has no such dimension. With one dimension both have the group, until a method is chosen.
    """

    outer: str
    inner: str


class Ranks(NamedTuple):
    """The groups of a call, None for a dimension of one rank, and this rank's place in each."""

    outer: Any
    inner: Any
    outer_size: int
    inner_size: int
    outer_rank: int
    inner_rank: int

    @property
    def world(self) -> int:
        return self.outer_size * self.inner_size

    @property
    def rank(self) -> int:
        return self.outer_rank * self.inner_size + self.inner_rank

    @property
    def groups(self) -> tuple[Any, ...]:
        return tuple(group for group in (self.outer, self.inner) if group is not None)


def names_of(group: Any, mesh: Any) -> Names:
    """The names of the groups of a call. Raises BadParam."""
    if group is not None and mesh is not None:
        raise BadParam(f"{arg('group')} and {arg('mesh')} were both given; pass one of them")
    if not dist.is_available() or not dist.is_initialized():
        raise BadParam(
            "PyTorch has no process groups yet; call torch.distributed.init_process_group first, as torchrun "
            "prepares it"
        )
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise BadParam(f"{arg('mesh')} has type {type(mesh).__name__}; expected a DeviceMesh")
        if mesh.ndim > 2:
            raise BadParam(
                f"{arg('mesh')} has {mesh.ndim} dimensions; pass the one or two that the sequence is cut "
                "over, for example mesh['cp']"
            )
        names = [mesh.get_group(dimension).group_name for dimension in range(mesh.ndim)]
        return Names(names[0], names[-1])
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise BadParam(
            f"{arg('group')} has type {type(group).__name__}; expected a ProcessGroup, for example of "
            "torch.distributed.new_group, that this rank is in"
        )
    return Names(group.group_name, group.group_name)


def ranks_of(outer: str, inner: str) -> Ranks:
    """The groups of these names; an empty name is a dimension of one rank."""
    groups = [resolved(name) if name else None for name in (outer, inner)]
    sizes = [1 if group is None else group.size() for group in groups]
    places = [0 if group is None else group.rank() for group in groups]
    groups = [None if size == 1 else group for group, size in zip(groups, sizes, strict=True)]
    return Ranks(*groups, *sizes, *places)


def flat_ranks(names: Names) -> Ranks:
    """The ranks of a call whose method does not matter: in one dimension, or in two."""
    return ranks_of(names.outer, "" if names.outer == names.inner else names.inner)


def resolved(name: str) -> Any:
    """The group of this name in this process."""
    return dist.distributed_c10d._resolve_process_group(name)


def check_device(ranks: Ranks, x: Tensor, name: str) -> None:
    """Raise DeviceTypeNotSupported for a tensor that a group cannot send."""
    for group in ranks.groups:
        types = [str(device) for device in getattr(group, "_device_types", ())]
        if types and x.device.type not in types:
            raise DeviceTypeNotSupported(
                f"{arg(name)} is on {x.device}, but the process group serves {', '.join(types)}; NCCL serves "
                "GPUs and gloo the CPU"
            )
