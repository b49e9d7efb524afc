// Which kernels a chip gets: one row for each kernel set (the code of an architecture with one of its tile sets).
#pragma once

#include <cstdint>
#include <functional>

#include "host/units.h"
#include "kernels/helper_params.h"
#include "kernels/params.h"
#include "kernels/tiles.h"

namespace dmattn {

struct KernelSet {
  const char* name;  // for dmattn_device_architecture() and the environment variable DMATTN_ARCH
  Arch arch;         // whose units have the kernels
  TileSet tiles;
  // Compute capabilities (10 * major + minor) of the chips that get this set, unless DMATTN_ARCH says otherwise.
  int32_t min_capability, max_capability;
  int32_t smem_per_block;  // bytes of shared memory that the largest tiles of the set may take
  // Not nullptr: the kernels are in no PTX, only in machine code for the chips for which this returns true. nullptr:
  // code for a chip has the kernels if it has their tile set (see cmake/cuda.cmake).
  bool (*is_compiled_for)(int32_t capability);
  // Name of the set whose units are used if `arch` has no unit, or none that serves the call; nullptr: there is none.
  const char* fallback;
  FwdTile (*fwd_tile)(const FwdParams& p, Level level, bool gathered);
  // in_64_rows: whether the tile must have 64 rows, or a multiple of that (see sm90_bwd_tile()).
  BwdTile (*bwd_tile)(int head_dim_tile, bool gathered, bool has_bias, bool in_64_rows);
  DqOrder (*dq_order)(const BwdTile& tile);
  // Whether the forward units compute this problem; nullptr: they compute every problem that they are compiled for.
  bool (*serves_fwd)(const FwdParams& p, Level level, bool gathered);
  // Whether the backward units, which always compute all three gradients, compute this problem; nullptr: they compute
  // every one. Asked only for problems that is_for_residents() (plan/bwd_residents.cpp) lets through: dense ones,
  // packed sequences without a mask and a bias, and lists without softcap whose bias, if any, is for each key.
  bool (*serves_bwd)(const BwdParams& p, bool gathered);
  // Whether its tiled kernels find the keys of a window (FwdParams::window) by themselves.
  bool finds_windows;
  // Whether thread blocks stay on an SM and take one block of rows (backward: of keys) after the other. In the
  // backward for head_dim_tile 256 they begin anew for each block of keys. Such backward kernels do not split packed
  // sequences.
  bool is_persistent;
};

// What is known of a GPU.
struct Device {
  const KernelSet* kernels = nullptr;
  int32_t num_sms = 108;
  int32_t smem_per_sm = 164 * 1024;  // shared memory of an SM, in bytes
};

// nullptr if there is no set of this name.
const KernelSet* find_kernel_set(const char* name);

// What a driver says about a chip.
struct Chip {
  int32_t device = 0;      // its number, for messages
  int32_t capability = 0;  // 10 * major + minor
  int32_t smem_per_block = 0;
};

// The set for a chip, or the one named `forced` (nullptr: not forced). built_for: the machine code and PTX that the
// binary holds, e.g. "sm_80,sm_89,compute_89". has_all_tiles: all of this code has every tile set. Fails with
// DMATTN_ERROR_UNSUPPORTED if no set fits, and with DMATTN_ERROR_INVALID_VALUE if there is no set named `forced`.
const KernelSet& choose_kernel_set(const Chip& chip, const char* forced, const char* built_for, bool has_all_tiles);

// The first of `kernels` and its fallbacks that has such a unit and for which serves(set) is true. unit.arch is set
// to its architecture. nullptr: there is none in this build.
const KernelSet* find_unit_set(const KernelSet& kernels, Unit& unit,
                               const std::function<bool(const KernelSet&)>& serves);
// The first set that has such a unit. Fails if this build has none.
const KernelSet& resolve_unit(const KernelSet& kernels, Unit& unit);
// Fails with DMATTN_ERROR_UNSUPPORTED because this build has no such unit.
[[noreturn]] void fail_without_unit(const Unit& unit);

}  // namespace dmattn
