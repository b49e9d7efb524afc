// What each chip gets: one row for each set of kernels (the code of an architecture with a set of tile shapes).
#pragma once

#include <cstdint>
#include <functional>

#include "host/units.h"
#include "kernels/helper_params.h"
#include "kernels/params.h"
#include "kernels/tiles.h"

namespace dmattn {

struct KernelSet {
  const char* name;  // as dmattn_device_architecture() and the variable DMATTN_ARCH have it
  Arch arch;         // whose units run it
  TileSet tiles;
  // Chips that it is for, from min_capability to max_capability (10 * major + minor), where it is not forced.
  int32_t min_capability, max_capability;
  int32_t smem_per_block;  // bytes of shared memory that its largest tiles may take
  // Where not nullptr: its kernels are in no PTX, but only in machine code of the chips for which this is true. Other
  // kernels are wherever their tile shapes are (see cmake/cuda.cmake).
  bool (*is_compiled_for)(int32_t capability);
  // Name of the set whose units stand in where `arch` has none of its own; nullptr: none does.
  const char* fallback;
  FwdTile (*fwd_tile)(const FwdParams& p, Level level, bool gathered);
  // in_64_rows: there is a dense mask, or sequences are packed.
  BwdTile (*bwd_tile)(int head_dim_tile, bool gathered, bool has_bias, bool in_64_rows);
  DqOrder (*dq_order)(const BwdTile& tile);
  // Whether its forward units compute this problem; nullptr: every one that they are compiled for.
  bool (*serves_fwd)(const FwdParams& p, Level level, bool gathered);
  // Whether its backward units, which always find all three gradients, compute this problem. It is dense, with or without a
  // dense mask, a window and a bias (then without softcap beside a mask or a bias, up to head_dim 128 without a mask
  // beside an fp32 bias for each row and key, and deterministic only as far as warps take turns, see
  // plan/bwd_residents.cpp); or of packed sequences with neither a mask nor a bias; or gathered, without softcap, and
  // its bias, if any, is for each key. nullptr: they compute every one.
  bool (*serves_bwd)(const BwdParams& p, bool gathered);
  // Its tiled kernels find the window of keys that rows see (FwdParams::window) by themselves.
  bool finds_windows;
  // Its kernels stay on an SM and take one block of rows (backward: of keys) after the other; those of the
  // backward for head_dim_tile 256 begin for each block of keys anew. Of the forward only the
  // plain kernel splits the keys; the backward does not split packed sequences.
  bool is_persistent;
};

// What is known of a GPU.
struct Device {
  const KernelSet* kernels = nullptr;
  int32_t num_sms = 108;
  int32_t smem_per_sm = 164 * 1024;  // bytes of shared memory that the blocks of an SM have together
};

// nullptr: there is none of that name.
const KernelSet* find_kernel_set(const char* name);

// What a driver says about a chip.
struct Chip {
  int32_t device = 0;      // its number, for messages
  int32_t capability = 0;  // 10 * major + minor
  int32_t smem_per_block = 0;
};

// The set for a chip, or the one named `forced` (nullptr: none is). `built_for` is what the binary holds, machine code
// and PTX, e.g. "sm_80,sm_89,compute_89", and has_all_tiles says that all of that code has every tile shape.
// Fails with DMATTN_ERROR_UNSUPPORTED where nothing fits, and _INVALID_VALUE for a name that there is not.
const KernelSet& choose_kernel_set(const Chip& chip, const char* forced, const char* built_for, bool has_all_tiles);

// The set whose unit does this work: `kernels`, or the first of its fallbacks that has one and for which serves(set) is
// true. unit.arch is set to its architecture. nullptr: this build has none.
const KernelSet* find_unit_set(const KernelSet& kernels, Unit& unit,
                               const std::function<bool(const KernelSet&)>& serves);
// The first that has one; fails where this build has none.
const KernelSet& resolve_unit(const KernelSet& kernels, Unit& unit);
// Fails with DMATTN_ERROR_UNSUPPORTED, as this build has no such unit.
[[noreturn]] void fail_without_unit(const Unit& unit);

}  // namespace dmattn
