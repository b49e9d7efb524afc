"""What a call would do: plan_probe.cpp as Python functions."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import abi
from abi import BOOL, bwd_params, fwd_params, tensor

SM80, SM89, SM90 = "sm80", "sm89", "sm90"  # sets of kernels: names in src/host/arch.cpp
TILED, MASK_LIST, SELECTION_LIST, ROW_BLOCK_LISTS = range(4)  # KeyWalk
KEY, TILE, DIRECT = 1, 2, 3  # BiasKind
PLAIN, GENERAL, FULL, PACKED, CUT = range(5)  # Level
DB_NONE, DB_KEY, DB_TILE, DB_ACCUM, DB_PAIR = range(5)  # DbiasKind
WORKSPACE = 1 << 44

Plan = dict[str, Any]


class Probe:
    """Plans of a build with or without the kernels for few keys.

    Without them small calls show how the other kernels are planned.
    """

    def __init__(self, library: ctypes.CDLL, short: bool = False) -> None:
        self.library = library
        self.short = short

    def fwd(
        self, kernels: str = SM80, sms: int = 132, packed: bool = False, **arguments: Any
    ) -> Plan:
        text = ctypes.create_string_buffer(1 << 14)
        params = abi.packed_fwd_params(**arguments) if packed else fwd_params(**arguments)
        self.library.probe_hold_short_units(int(self.short))
        status = self.library.probe_fwd(
            *(ctypes.byref(params), kernels.encode(), sms, ctypes.c_void_p(WORKSPACE)),
            *(text, ctypes.c_size_t(len(text))),
        )
        return self._read(status, text)

    def bwd(
        self,
        kernels: str = SM80,
        sms: int = 132,
        round: int = 0,
        launch: tuple[int, int, int] = (0, 0, 0),
        packed: bool = False,
        **arguments: Any,
    ) -> Plan:
        text = ctypes.create_string_buffer(1 << 14)
        params = abi.packed_bwd_params(**arguments) if packed else bwd_params(**arguments)
        self.library.probe_hold_short_units(int(self.short))
        status = self.library.probe_bwd(
            *(
                ctypes.byref(params),
                kernels.encode(),
                sms,
                ctypes.c_void_p(WORKSPACE),
                round,
                *launch,
            ),
            *(text, ctypes.c_size_t(len(text))),
        )
        return self._read(status, text)

    def bwd_size(self, kernels: str = SM80, sms: int = 132, **arguments: Any) -> int:
        """Bytes of the workspace, as asked for before any tensor has memory."""
        params = bwd_params(**arguments)
        for name, kind in params._fields_:
            if kind is abi.Tensor:
                getattr(params, name).data = None
        text = ctypes.create_string_buffer(1 << 14)
        self.library.probe_hold_short_units(int(self.short))
        status = self.library.probe_bwd_size(
            *(ctypes.byref(params), kernels.encode(), sms, text, ctypes.c_size_t(len(text)))
        )
        return int(self._read(status, text)["workspace_bytes"])

    def cache(self, kernels: str = SM80, sms: int = 132, **fields: Any) -> Plan:
        params = abi.cache_append_params(**fields)
        text = ctypes.create_string_buffer(1 << 14)
        status = self.library.probe_cache(
            *(ctypes.byref(params), kernels.encode(), sms, ctypes.c_void_p(WORKSPACE)),
            *(text, ctypes.c_size_t(len(text))),
        )
        return self._read(status, text)

    def draft(self, kernels: str = SM80, sms: int = 132, **fields: Any) -> Plan:
        return self._describe("probe_draft", abi.cache_draft_params(**fields), sms, kernels)

    def commit(self, sms: int = 132, **fields: Any) -> Plan:
        return self._describe("probe_commit", abi.cache_commit_params(**fields), sms)

    def select(self, sms: int = 132, **fields: Any) -> Plan:
        return self._describe("probe_select", abi.select_params(**fields), sms)

    def key_lists(self, sms: int = 132, **fields: Any) -> Plan:
        return self._describe("probe_key_lists", abi.build_key_lists_params(**fields), sms)

    def join_keys(self, sms: int = 132, **fields: Any) -> Plan:
        return self._describe("probe_join_keys", abi.join_keys_params(**fields), sms)

    def keep_keys(self, sms: int = 132, **fields: Any) -> Plan:
        return self._describe("probe_keep_keys", abi.keep_keys_params(**fields), sms)

    def _describe(self, function: str, params: abi.Params, sms: int, kernels: str = SM80) -> Plan:
        text = ctypes.create_string_buffer(1 << 14)
        status = getattr(self.library, function)(
            *(ctypes.byref(params), kernels.encode(), sms, ctypes.c_void_p(WORKSPACE)),
            *(text, ctypes.c_size_t(len(text))),
        )
        return self._read(status, text)

    @staticmethod
    def _read(status: int, text: ctypes.Array[ctypes.c_char]) -> Plan:
        assert status == abi.OK, text.value.decode()
        plan = json.loads(text.value)
        assert isinstance(plan, dict)
        return plan


def mask(*shape: int, stride: tuple[int, ...] | None = None) -> abi.Tensor:
    return tensor(shape, BOOL, stride)


# What lies in the workspace of a backward call, by the name of its address.
ARRAYS = (
    *("lse", "lse_rest", "delta", "dq_accum", "dq_semaphore", "dkv_semaphore"),
    *("dk_slots", "dv_slots", "dk_accum", "dv_accum"),
    *("dbias_cols", "schedule", "mask.bits", "keys.idx"),
)


def zeroed_bytes(found: Plan) -> int:
    """Size of the part of the workspace that starts as zeros in the first round."""
    names = ("once_zero_bytes", "counter_zero_bytes", "dq_zero_bytes", "dkv_zero_bytes")
    return sum(int(found[name]) for name in names)


def array_bytes(found: Plan, shape: dict[str, int], lists: int) -> dict[str, int]:
    """What each array has to hold at least."""
    rows = shape["batch"] * shape["nheads"]
    round_kv_rows = found["round.batches"] * found["round.heads_k"]
    round_rows = round_kv_rows * found["round.groups"]
    blocks_q = -(-shape["seqlen_q"] // found["block_m"])
    if found["round.row_blocks"] * found["keys.block_rows"] < shape["seqlen_q"]:
        blocks_q = -(-found["round.row_blocks"] * found["keys.block_rows"] // found["block_m"])
    tiles = round_kv_rows * -(-shape["seqlen_k"] // found["block_n"])
    splits = found["num_splits"] if found["deterministic"] else min(found["num_splits"] - 1, 1)
    if found["arch"] == 90:  # the parts of a tile are added up in one place
        splits = 1
    slots = found["max_tiles"] if found["gathered"] else tiles * splits
    slot = slots * found["block_n"] * found["dim_tile"] * 4
    kv = round_kv_rows * shape["seqlen_k"] * shape["head_dim"] * 4
    return {
        "lse": rows * found["seqlen_q_rounded"] * 4,
        "lse_rest": rows * found["seqlen_q_rounded"] * 4,
        "dkv_semaphore": (2 * tiles if found["arch"] == 90 else round_kv_rows) * 4,
        "delta": rows * found["seqlen_q_rounded"] * 4,
        "dq_accum": round_rows * blocks_q * found["block_m"] * found["dq_dims"] * 4,
        "dq_semaphore": round_rows * blocks_q * 4,
        "dk_slots": slot,
        "dv_slots": slot,
        "dk_accum": kv,
        "dv_accum": kv,
        "dbias_cols": rows * shape["seqlen_k"] * 4,
        "schedule": (shape["batch"] * shape["nheads_k"] + 3) * 4,
        "mask.bits": lists * shape["seqlen_q"] * shape["seqlen_k"] // 8,
        "keys.idx": lists * (shape["seqlen_k"] + 1) * 4,
    }
