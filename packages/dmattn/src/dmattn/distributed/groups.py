"""Process groups: how callers may name one, and how ranks agree before they exchange keys.

A rank that raised an error by itself would leave the others waiting in a collective. So ranks first
tell each other, on the host, what they were called with or what was wrong with it, and all of them
raise the same error, or none does.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dmattn.validation import describe

# A process group, a mesh of one dimension, or a mesh and the name or number of one of its
# dimensions. None is the default group, of all processes.
Group = dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | None

# Gathers one tensor of each rank into one; the second name is the one in older torch.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_WANTED = (
    "a ProcessGroup, a DeviceMesh of one dimension, a tuple of a DeviceMesh and one of its "
    "dimensions, or None for all processes"
)
_T = TypeVar("_T")
_CPU = torch.device("cpu")
MESSAGE_BYTES = 4096  # of each rank's part in an agreement
_ERRORS: dict[str, type[Exception]] = {
    "TypeError": TypeError,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
}
_c10d: Any = distributed_c10d  # many of its names have no types
# For groups that cannot carry tensors of the CPU. Keys: the ranks of the group. Values: a gloo
# backend, and what the group of all processes was when that backend was made.
_host_backends: dict[tuple[int, ...], tuple[Any, Any]] = {}


class Ranks(NamedTuple):
    """A process group in terms that a compiler takes for constants."""

    name: str
    rank: int  # of this process
    size: int


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def ranks_of(group: Group) -> Ranks:
    """What a compiler has to know of `group`; raises as `process_group`."""
    found = process_group(group)
    return Ranks(found.group_name, dist.get_rank(found), dist.get_world_size(found))


def process_group(group: Any) -> dist.ProcessGroup:
    """The process group that an argument means.

    Raises:
        TypeError: it is nothing that `Group` allows.
        ValueError: a mesh has several dimensions and none is named, or it lacks the one that is
            named, or this process is not in the group.
        RuntimeError: torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: got a call before torch.distributed was initialised, wanted "
            "torch.distributed.init_process_group() first"
        )
    found: Any
    if group is None:
        found = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: got a DeviceMesh of {group.ndim} dimensions, wanted one dimension, such "
                "as mesh['cp'] or (mesh, 'cp')"
            )
        found = group.get_group()
    elif isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        found = _of_dimension(*group)
    else:
        found = group
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: got a group that this process is not in, wanted one of its own")
    if not isinstance(found, dist.ProcessGroup):
        raise TypeError(f"group: got {describe(group)}, wanted {_WANTED}")
    return found


def _of_dimension(mesh: DeviceMesh, dim: Any) -> Any:
    """The group of a dimension of a mesh, by its name or number."""
    if not isinstance(dim, (int, str)):
        raise TypeError(f"group: got a DeviceMesh and {describe(dim)}, wanted {_WANTED}")
    try:
        return mesh.get_group(dim)
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"group: got a DeviceMesh and {describe(dim)}, wanted one of its {mesh.ndim} "
            f"dimensions, whose names are {mesh.mesh_dim_names}"
        ) from error


def by_name(name: str) -> dist.ProcessGroup:
    """The process group of this name, by which operators know it."""
    group: dist.ProcessGroup = _c10d._resolve_process_group(name)
    return group


def agree(
    group: dist.ProcessGroup, facts: Mapping[str, Any], error: Exception | None = None
) -> list[dict[str, Any]]:
    """The facts of every rank of the group, in order of rank; every rank has to call this.

    The ranks exchange them on the host, which does not wait for a GPU.

    Args:
        group: the ranks.
        facts: of this rank: names and values that JSON can hold. Names that start with an
            underscore may have different values; of the others all ranks must have the same.
        error: what is wrong with the arguments of this rank, if anything.

    Raises:
        TypeError, ValueError, RuntimeError: `error` of any rank, on every rank. Errors of other
            kinds are raised on the other ranks as RuntimeError.
        ValueError: the facts differ.
    """
    everybody = _all_gather(group, _as_message(facts, error))
    if error is not None:
        raise error
    for rank, said in enumerate(everybody):
        if "error" in said:
            raise _ERRORS[said["kind"]](f"on rank {rank} of the group: {said['error']}")
    known = [said["facts"] for said in everybody]
    # A name that is missing on some rank is a difference, too, which all ranks have to notice.
    for name in dict.fromkeys(name for there in known for name in there):
        values = [there.get(name) for there in known]
        if not name.startswith("_") and any(value != values[0] for value in values):
            text = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{name}: got {text} of the group, wanted the same on all ranks")
    return known


def prepare(group: Group, work: Callable[[], _T]) -> _T:
    """What `work` returns, which each rank runs by itself before all of them agree.

    If it raises an error, the other ranks are told, and raise it, too, when they call `agree`.

    Raises:
        Exception: that of `work`.
    """
    try:
        return work()
    except Exception as error:  # whatever it is, the others must not be left waiting
        agree(process_group(group), {}, error)
        raise


def _as_message(facts: Mapping[str, Any], error: Exception | None) -> bytes:
    if error is None:
        return json.dumps({"facts": dict(facts)}).encode()
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "RuntimeError")
    text = str(error)[: MESSAGE_BYTES // 8]
    message = json.dumps({"kind": kind, "error": text}).encode()
    if len(message) > MESSAGE_BYTES:  # JSON has twelve bytes for some characters
        message = json.dumps({"kind": kind, "error": text[: MESSAGE_BYTES // 16]}).encode()
    return message


def _all_gather(group: dist.ProcessGroup, message: bytes) -> list[dict[str, Any]]:
    # Filled up with blanks, which JSON ignores.
    mine = torch.frombuffer(bytearray(message.ljust(MESSAGE_BYTES)), dtype=torch.uint8)
    # Read from this memory: within a transform of torch.func nobody can read values of tensors.
    received = bytearray(dist.get_world_size(group) * MESSAGE_BYTES)
    everybody = torch.frombuffer(received, dtype=torch.uint8)
    if _carries_cpu(group):
        all_gather(everybody, mine, group=group)
    else:
        parts = list(everybody.view(-1, MESSAGE_BYTES).unbind())
        _host_backend(group).allgather([parts], [mine]).wait()
    starts = range(0, len(received), MESSAGE_BYTES)
    return [json.loads(received[start : start + MESSAGE_BYTES]) for start in starts]


def _host_backend(group: dist.ProcessGroup) -> Any:
    """A gloo backend for the ranks of a group; made at the first call.

    Not made by `dist.new_group`: if only the ranks of a group call that, it names the new group by
    the number of groups that a process has, and ranks with unequal numbers would wait for each
    other.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    made, world = _host_backends.get(ranks, (None, None))
    if made is None or world is not dist.group.WORLD:
        name = f"dmattn/{'_'.join(map(str, ranks))}"
        store = _c10d.PrefixStore(name, _c10d._get_default_store())
        limit = timeout(group) or _c10d.default_pg_timeout
        made = _c10d.ProcessGroupGloo(store, dist.get_rank(group), len(ranks), limit)
        _host_backends[ranks] = made, dist.group.WORLD
    return made


def _carries_cpu(group: dist.ProcessGroup) -> bool:
    return _CPU in group._device_types


def timeout(group: dist.ProcessGroup) -> Any:
    """How long collectives of a group wait for a rank: a datetime.timedelta, or None if unknown."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)
