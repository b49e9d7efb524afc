#include "host/arch.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "host/dtype.h"
#include "host/error.h"
#include "host/problem.h"
#include "kernels/sm90_changed_scores.h"
#include "kernels/sm90_fwd_times.h"

namespace dmattn {
namespace {

template <TileSet kTiles>
FwdTile sm80_fwd_tile(const FwdParams& p, Level level, bool gathered) {
  return fwd_tile(kTiles, head_dim_tile(p.head_dim), level, gathered);
}
template <TileSet kTiles>
BwdTile sm80_bwd_tile(int d, bool, bool, bool) {
  return bwd_tile(kTiles, d);
}
DqOrder sm80_dq_order(const BwdTile&) { return DqOrder::kRegisters; }

FwdTile sm90_fwd_tile_of(const FwdParams& p, Level level, bool gathered) {
  if (gathered) {
    const Sm90ListTile tile = sm90_list_tile(sm90_list_head_dim(p.head_dim), sm90_lists_are_short(p));
    return {kSm90ListRows, tile.block_n, kSm90ListWarps, tile.blocks_per_sm};
  }
  const auto shape = [&] { return p.num_splits > 1 ? Sm90FwdShape::kShort : sm90_fwd_shape(p); };
  const Sm90FwdTile tile = !is_general(level)    ? sm90_fwd_tile(sm90_fwd_head_dim(p.head_dim), shape())
                           : has_plain_window(p) ? sm90_window_fwd_tile(head_dim_tile(p.head_dim))
                                                 : sm90_changed_fwd_tile(p, p.num_splits);
  return {tile.block_m(), tile.block_n, 4 * (tile.consumers + 1), tile.blocks_per_sm};
}
// TMA takes strides of at most 2^40 bytes, and not the strides of 0 that expanded views have.
bool has_tma_strides(const Strides3& stride, int32_t batch, int32_t rows, int32_t heads) {
  constexpr int64_t kLimit = int64_t{1} << 39;  // in 16-bit elements
  const auto fits = [](int64_t step, int32_t extent) { return extent == 1 || (step > 0 && step < kLimit); };
  return fits(stride.batch, batch) && fits(stride.row, rows) && fits(stride.head, heads);
}
// The same for packed sequences. Their maps number rows backwards from 2^30, and have a stride of 2^34 bytes less
// that of a row (see kPackedOrigin).
bool has_packed_tma_strides(const Strides3& stride, int32_t rows, int32_t heads) {
  return rows <= (1 << 30) && stride.row < int64_t{1} << 33 && has_tma_strides(stride, 1, rows, heads);
}
// The kernels compute the address of a listed row as a 32-bit number times its stride in bytes.
bool has_gather_stride(const Strides3& stride) { return stride.row >= 0 && stride.row <= INT32_MAX; }
bool sm90_serves_lists(const FwdParams& p, Level level) {
  const bool has_key_bias = level == Level::kGeneral && p.bias.kind == BiasKind::kKey && p.softcap == 0.f &&
                            !p.packing.is_active() && p.vec_q && p.vec_k && p.vec_v && p.vec_out;
  return (level == Level::kPlain || has_key_bias) && has_gather_stride(p.k_stride) && has_gather_stride(p.v_stride);
}
// Whether Hopper's kernels take these tiles: of a bias for each row and key, 16-bit or fp32, or of its gradient.
// Their rows may start anywhere, as threads copy what TMA does not take. A stride of 0 means that heads or batches
// share the bias.
constexpr int32_t kMostKeysOfBiasRow = 1 << 29;  // threads count the bytes of such a row in 32 bits
bool serves_bias_tiles(const Strides3& s, int32_t batch, int32_t rows, int32_t heads, int32_t keys) {
  return keys <= kMostKeysOfBiasRow && has_tma_strides(s, s.batch == 0 ? 1 : batch, rows, s.head == 0 ? 1 : heads);
}
bool sm90_serves_bias(const FwdParams& p) {
  const BiasParams& bias = p.bias;
  if (bias.kind == BiasKind::kNone || bias.kind == BiasKind::kKey) return true;
  const Strides3 stride = {bias.batch_stride, bias.head_stride, bias.row_stride};
  return bias.col_stride == 1 && serves_bias_tiles(stride, p.batch, p.seqlen_q, p.nheads, p.seqlen_k);
}
// Windows have a kernel of their own; the kernels for softcap, and that for a bias for each key beside a mask, find
// windows, too.
bool sm90_serves_window(const FwdParams& p) {
  const bool has_key_bias = p.bias.kind == BiasKind::kKey && p.softcap == 0.f && p.softmax_scale > 0.f;
  return p.window == 0 || has_plain_window(p) || has_plain_softcap(p) || has_key_bias;
}
bool sm90_serves_tiles(const FwdParams& p, Level level) {
  const bool is_served = level == Level::kPlain ||
                         (sm90_serves_window(p) && p.vec_q && p.vec_k && p.vec_v && p.vec_out && sm90_serves_bias(p));
  return is_served && has_tma_strides(p.k_stride, p.batch, p.seqlen_k, p.nheads_k) &&
         has_tma_strides(p.v_stride, p.batch, p.seqlen_k, p.nheads_k);
}
bool sm90_serves_packed(const FwdParams& p, Level level) {
  const bool is_capped = has_plain_softcap(p) && p.vec_q && p.vec_k && p.vec_v && p.vec_out;
  if (level != Level::kPacked && !is_capped) return false;
  const auto fits_rows = [&](const Strides3& s) { return has_packed_tma_strides(s, p.packing.total_q, p.nheads); };
  const auto fits_keys = [&](const Strides3& s) { return has_packed_tma_strides(s, p.packing.total_k, p.nheads_k); };
  return fits_rows(p.q_stride) && fits_rows(p.out_stride) && fits_keys(p.k_stride) && fits_keys(p.v_stride);
}
bool sm90_serves_fwd(const FwdParams& p, Level level, bool gathered) {
  if (p.packing.is_active()) return !gathered && sm90_serves_packed(p, level);
  const bool serves_keys = gathered ? sm90_serves_lists(p, level) : sm90_serves_tiles(p, level);
  return serves_keys && has_tma_strides(p.q_stride, p.batch, p.seqlen_q, p.nheads) &&
         has_tma_strides(p.out_stride, p.batch, p.seqlen_q, p.nheads);
}

DqOrder sm90_dq_order(const BwdTile& tile) {
  return tile.block_m % 64 == 0 ? DqOrder::kVectors : DqOrder::kTransposedVectors;
}
// The gradient's strides matter only if each score has its own entry (kTile). Sums may have rows of any length.
bool has_bias_tiles(const BwdParams& p) {
  if (p.bias.kind == BiasKind::kNone || p.bias.kind == BiasKind::kKey) return true;
  const auto serves = [&](const Strides3& s) {
    return serves_bias_tiles(s, p.batch, p.seqlen_q, p.nheads, p.seqlen_k);
  };
  const Strides3 to = {p.dbias_batch_stride, p.dbias_head_stride, p.dbias_row_stride};
  return p.bias.col_stride == 1 && serves({p.bias.batch_stride, p.bias.head_stride, p.bias.row_stride}) &&
         (p.dbias_kind != DbiasKind::kTile || serves(to));
}
// Clusters that add to dq in a fixed order first check the boundaries of all sequences, each cluster by itself.
constexpr int32_t kMostSequencesOfWideTurns = 1024;
// The kernel computes the address of a row of a bias as a 32-bit number times its stride in bytes.
bool sm90_serves_wide_bwd(const BwdParams& p, bool gathered) {
  if (gathered) return true;
  if (p.bias.row_stride > INT32_MAX / 4) return false;
  if (p.deterministic && p.packing.sequences > kMostSequencesOfWideTurns) return false;
  return p.softcap == 0.f || has_finite_softcap(p.softcap);
}
// Scores that are cut are -inf before they are multiplied by the scale, and stay -inf only if the scale is positive.
bool sm90_serves_bwd(const BwdParams& p, bool gathered) {
  const bool is_packed = p.packing.is_active();
  const auto fits_rows = [&](const Strides3& s) {
    return is_packed ? has_packed_tma_strides(s, p.packing.total_q, p.nheads)
                     : has_tma_strides(s, p.batch, p.seqlen_q, p.nheads);
  };
  const auto fits_keys = [&](const Strides3& s) {
    return is_packed ? has_packed_tma_strides(s, p.packing.total_k, p.nheads_k)
                     : has_tma_strides(s, p.batch, p.seqlen_k, p.nheads_k);
  };
  const bool serves_rows = p.vec_q && p.vec_k && p.vec_v && p.vec_dout && p.softmax_scale > 0.f &&
                           fits_rows(p.q_stride) && fits_rows(p.dout_stride);
  const bool is_wide = head_dim_tile(p.head_dim) > 128;
  if (is_wide && !sm90_serves_wide_bwd(p, gathered)) return false;
  if (!is_wide && p.window > 0 && p.softcap > 0.f) return false;
  if (gathered) return serves_rows && has_gather_stride(p.k_stride) && has_gather_stride(p.v_stride);
  return serves_rows && has_bias_tiles(p) && p.vec_dk && p.vec_dv && fits_keys(p.k_stride) && fits_keys(p.v_stride) &&
         fits_keys(p.dk_stride) && fits_keys(p.dv_stride);
}

// Hopper's own instructions are in no PTX that newer chips could run: the code is for 9.0 alone.
bool is_hopper(int32_t capability) { return capability == 90; }

constexpr int32_t kNewest = INT32_MAX;

// A chip gets the first of these sets that is for its compute capability, fits its shared memory, and has code in the
// binary. So newer architectures come before older ones. sm89 is the sm80 code with tiles that fit 99 KB: chips of
// 8.6, 8.9 and 12.x have no more.
constexpr KernelSet kKernelSets[] = {
    {"sm90", Arch{90}, TileSet::kWide, 90, 90, /*smem_per_block=*/227 * 1024, is_hopper, /*fallback=*/"sm80",
     sm90_fwd_tile_of, sm90_bwd_tile, sm90_dq_order, sm90_serves_fwd, sm90_serves_bwd, /*finds_windows=*/true,
     /*is_persistent=*/true},
    {"sm80", Arch{80}, TileSet::kWide, 80, kNewest, smem_limit(TileSet::kWide), /*is_compiled_for=*/nullptr,
     /*fallback=*/nullptr, sm80_fwd_tile<TileSet::kWide>, sm80_bwd_tile<TileSet::kWide>, sm80_dq_order,
     /*serves_fwd=*/nullptr, /*serves_bwd=*/nullptr, /*finds_windows=*/false, /*is_persistent=*/false},
    {"sm89", Arch{80}, TileSet::kNarrow, 80, kNewest, smem_limit(TileSet::kNarrow), /*is_compiled_for=*/nullptr,
     /*fallback=*/nullptr, sm80_fwd_tile<TileSet::kNarrow>, sm80_bwd_tile<TileSet::kNarrow>, sm80_dq_order,
     /*serves_fwd=*/nullptr, /*serves_bwd=*/nullptr, /*finds_windows=*/false, /*is_persistent=*/false},
};
constexpr int32_t kOldestCapability = 80;

bool fits(const KernelSet& set, const Chip& chip) {
  return chip.capability >= set.min_capability && chip.capability <= set.max_capability &&
         chip.smem_per_block >= set.smem_per_block;
}

const KernelSet& find_forced(const char* name) {
  if (const KernelSet* found = find_kernel_set(name)) return *found;
  char names[128] = "";
  for (const KernelSet& set : kKernelSets) {
    const size_t used = std::strlen(names);
    std::snprintf(names + used, sizeof(names) - used, "%s%s", used == 0 ? "" : " or ", set.name);
  }
  fail(DMATTN_ERROR_INVALID_VALUE, "DMATTN_ARCH in the environment is '%s'; wanted %s", name, names);
}

// The tile sets for which the code of a chip is compiled.
struct HeldTiles {
  bool wide = false, narrow = false;
  bool hold(TileSet tiles) const { return tiles == TileSet::kNarrow ? narrow : wide; }
};

// The number in a name like "sm_80" or "compute_80"; 0 if the name begins otherwise, or does not end with the number.
int32_t number_behind(const char* prefix, const char* name, size_t length) {
  const size_t begin = std::strlen(prefix);
  if (length <= begin || std::strncmp(name, prefix, begin) != 0) return 0;
  int32_t number = 0;
  for (size_t i = begin; i < length; ++i) {
    if (name[i] < '0' || name[i] > '9') return 0;
    number = 10 * number + (name[i] - '0');
  }
  return number;
}

// What the binary has for a chip, according to a list like "sm_80,sm_89,compute_89". The driver takes the newest
// machine code that has the chip's major capability and that the chip can run; if there is none, the newest PTX.
// cmake/cuda.cmake decides which tile sets each of these has.
HeldTiles tiles_of_chip(const char* built_for, int32_t capability) {
  int32_t native = 0, ptx = 0;
  for (const char* at = built_for; *at != '\0';) {
    const size_t length = std::strcspn(at, ",");
    const int32_t machine = number_behind("sm_", at, length), virtual_code = number_behind("compute_", at, length);
    if (machine / 10 == capability / 10 && machine <= capability) native = std::max(native, machine);
    if (virtual_code <= capability) ptx = std::max(ptx, virtual_code);
    at += length + (at[length] == ',' ? 1 : 0);
  }
  const bool is_narrow = native == 86 || native == 89 || native / 10 == 12;
  if (native > 0) return {!is_narrow, is_narrow};
  return {ptx > 0, ptx >= 89};
}

// Whether a list like "sm_80,sm_90a" has machine code that is for this capability alone.
bool has_own_code(const char* built_for, int32_t capability) {
  for (const char* at = built_for; *at != '\0';) {
    const size_t length = std::strcspn(at, ",");
    const size_t digits = length > 0 && at[length - 1] == 'a' ? length - 1 : length;
    if (number_behind("sm_", at, digits) == capability) return true;
    at += length + (at[length] == ',' ? 1 : 0);
  }
  return false;
}

}  // namespace

const KernelSet* find_kernel_set(const char* name) {
  for (const KernelSet& set : kKernelSets) {
    if (std::strcmp(set.name, name) == 0) return &set;
  }
  return nullptr;
}

const KernelSet& choose_kernel_set(const Chip& chip, const char* forced, const char* built_for, bool has_all_tiles) {
  const int major = chip.capability / 10, minor = chip.capability % 10;
  if (chip.capability < kOldestCapability) {
    fail(DMATTN_ERROR_UNSUPPORTED, "device %d has compute capability %d.%d; wanted at least %d.%d", chip.device, major,
         minor, kOldestCapability / 10, kOldestCapability % 10);
  }
  const HeldTiles held = tiles_of_chip(built_for, chip.capability);
  const auto is_compiled = [&](const KernelSet& set) {
    if (has_all_tiles) return true;
    if (!held.hold(set.tiles)) return false;
    return set.is_compiled_for == nullptr ||
           (set.is_compiled_for(chip.capability) && has_own_code(built_for, chip.capability));
  };
  // chosen: the first set that fits and is compiled. If there is none, the error names the first that fits, or the
  // one with the smallest tiles.
  const KernelSet* chosen = nullptr;
  const KernelSet* fitting = nullptr;
  const KernelSet* smallest = &kKernelSets[0];
  for (const KernelSet& set : kKernelSets) {
    if (fitting == nullptr && fits(set, chip)) fitting = &set;
    if (chosen == nullptr && fits(set, chip) && is_compiled(set)) chosen = &set;
    if (set.smem_per_block < smallest->smem_per_block) smallest = &set;
  }
  if (forced != nullptr) chosen = &find_forced(forced);
  if (chosen == nullptr) chosen = fitting != nullptr ? fitting : smallest;
  if (!is_compiled(*chosen)) {
    fail(DMATTN_ERROR_UNSUPPORTED,
         "device %d has compute capability %d.%d; this build (%s) lacks the %s kernels for it, which fit %d bytes of "
         "shared memory a block",
         chip.device, major, minor, built_for, chosen->name, chosen->smem_per_block);
  }
  if (chip.smem_per_block < chosen->smem_per_block) {
    fail(DMATTN_ERROR_UNSUPPORTED, "device %d has %d bytes of shared memory a block; wanted %d for the %s kernels",
         chip.device, chip.smem_per_block, chosen->smem_per_block, chosen->name);
  }
  return *chosen;
}

const KernelSet* find_unit_set(const KernelSet& kernels, Unit& unit,
                               const std::function<bool(const KernelSet&)>& serves) {
  for (const KernelSet* set = &kernels; set != nullptr;
       set = set->fallback != nullptr ? find_kernel_set(set->fallback) : nullptr) {
    unit.arch = set->arch;
    if (has_unit(unit) && serves(*set)) return set;
  }
  return nullptr;
}

const KernelSet& resolve_unit(const KernelSet& kernels, Unit& unit) {
  const KernelSet* found = find_unit_set(kernels, unit, [](const KernelSet&) { return true; });
  if (found == nullptr) fail_without_unit(unit);
  return *found;
}

void fail_without_unit(const Unit& unit) {
  // Not for the directions for few keys: such calls can fall back on the forward and the backward.
  const char* direction = unit.direction == Direction::kForward    ? "forward"
                          : unit.direction == Direction::kBackward ? "backward"
                                                                   : "decode";
  fail(DMATTN_ERROR_UNSUPPORTED, "this build of the library has no %s kernel for %s, head_dim up to %d, %s keys",
       direction, dtype_name(unit.dtype), unit.head_dim_tile, unit.gathered ? "gathered" : "dense");
}

}  // namespace dmattn
