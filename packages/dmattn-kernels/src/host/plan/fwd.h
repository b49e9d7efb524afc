// What a forward call will do: every decision, and where everything lies in the workspace. Pure functions of the
// parameters and the device's properties, like all of src/host: nothing here touches a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dmattn/dmattn.h"
#include "host/arch.h"
#include "host/problem.h"
#include "host/workspace.h"
#include "kernels/params.h"
#include "kernels/short_params.h"
#include "kernels/tiles.h"

namespace dmattn {

struct FwdPlan {
  bool is_empty = false;  // there is no output at all
  bool no_keys = false;   // out = 0, lse = -inf
  KeyWalk walk = KeyWalk::kTiled;
  MaskSource mask;  // see has_mask()
  Unit unit;        // unit.direction: few query rows a head are for the decode kernel, few keys for the short one
  KernelChoice choice;
  FwdTile tile = {};         // of the forward kernel
  bool counts_work = false;  // the forward kernel takes row blocks by kernel.work_counter
  FwdParams kernel;
  ShortFwdParams short_kernel;   // few keys: in place of `kernel`
  uint64_t* arrivals = nullptr;  // of the decode kernel, where it splits the keys: first in the workspace
  size_t workspace_bytes = 0;

  bool is_decode() const { return unit.direction == Direction::kDecode; }
  int32_t rows_of_decode_block() const {
    return kernel.token_rows.count > 1 ? dmattn::token_rows(unit.head_dim_tile) : kDecodeRows;
  }
  bool is_short() const { return unit.direction == Direction::kShortForward; }
  // Whether the forward kernel leaves partial results, to be combined behind it.
  bool leaves_parts() const { return kernel.num_splits > 1 || kernel.token_rows.count > 1; }
};

// `p` has been validated. The arrays in the workspace have no place yet: see place().
FwdPlan plan_fwd(const dmattn_fwd_params& p, const Device& device);
// Gives every array its place in a workspace that starts at `base`, or only counts the bytes where that is null.
void place(FwdPlan& plan, void* base);

// The level of the forward kernel that serves `p`. has_dense_mask: there is a mask, and it is not read as a list.
Level fwd_level(const FwdParams& p, bool has_dense_mask, bool gathered);

// A split of fewer key tiles than this (256 keys of most kernels) costs more to set up and to combine than it gains.
constexpr int32_t min_tiles_per_split(int32_t block_n) { return block_n >= 128 ? 2 : 4; }
// Parts into which the keys of a row block are split, so that `blocks` blocks of work fill `resident` places evenly.
int32_t choose_num_splits(int64_t blocks, int64_t resident, int32_t key_tiles, int32_t min_tiles);

}  // namespace dmattn
