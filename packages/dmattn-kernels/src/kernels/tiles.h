// The tile shapes of the kernels: read by the host, which plans with them (src/host), and by the kernels.
#pragma once

#include <cstdint>

#include "params.h"

namespace dmattn {

// An architecture that kernels are written for, by its number: Arch{80} has its kernels in the folder sm80, its units
// in cmake/units.cmake, and its row in src/host/arch.cpp.
enum class Arch : int32_t {};

// Sets of tile shapes of the sm80 kernels, by the shared memory that a thread block may have.
enum class TileSet : int32_t { kWide = 0, kNarrow = 1 };
constexpr int smem_limit(TileSet tiles) { return (tiles == TileSet::kNarrow ? 99 : 163) * 1024; }

// Each kernel is compiled for several levels of generality, because what a level can do costs registers even where it
// is not used:
//   kPlain    lengths and causality only, rows that start on 16 bytes; in the backward all three gradients
//   kPacked   the same over packed sequences (tiled only)
//   kGeneral  decided at run time: any alignment, key bias, 16-bit bias tiles, dense mask, softcap (forward), key
//             dbias, 16-bit dbias tiles, any subset of gradients, deterministic dq, packed sequences
//   kFull     also element loads of the bias (fp32, strided or gathered columns), dbias from registers (fp32, shared
//             between heads), softcap in the backward. These kernels may spill.
//   kCut      decoding only: as kPlain, for head_dims that do not fill their tile
enum class Level : int32_t { kPlain = 0, kGeneral = 1, kFull = 2, kPacked = 3, kCut = 4 };
constexpr bool is_general(Level level) { return level == Level::kGeneral || level == Level::kFull; }

struct FwdTile {
  int block_m, block_n, warps;
  int blocks_per_sm = 1;  // if thread blocks stay on their SM: how many of them each SM has
  constexpr bool operator==(const FwdTile& other) const {
    return block_m == other.block_m && block_n == other.block_n && warps == other.warps &&
           blocks_per_sm == other.blocks_per_sm;
  }
};

struct BwdTile {
  int block_m, block_n, warps;
  int warps_m_sdp;  // warps along the rows of S and dP (the others along the keys)
  int warps_n_dkv;  // warps along the keys of dK and dV (the others along head_dim)
  int warps_m_dq;   // warps along the rows of dQ (the others along head_dim)
  int stages_q;     // shared-memory stages of Q
  int cluster = 1;  // thread blocks that share the keys of a tile; `warps` are those of all of them
};

// Head dimensions are rounded up to one of three sizes, each of which has units of its own.
constexpr int head_dim_tile(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

// A warp of the forward owns block_m / warps rows. With 32 rows it reads K and V from shared memory half as often for
// each matrix instruction as with 16, and 32 rows fit the register file up to head_dim 128 (128 registers for acc_o,
// 64 for acc_s). Plain kernels (packed or not) over contiguous keys have enough registers for tiles of 128 keys at
// head_dim 64: 308 instead of 278 TFLOP/s on an H200. The other kernels would spill.
constexpr FwdTile fwd_tile(TileSet tiles, int d, Level level, bool gathered) {
  return d <= 64                     ? (is_general(level) || gathered ? FwdTile{128, 64, 4}    // 32 KB
                                                                      : FwdTile{128, 128, 4})  // 48 KB
         : d <= 128                  ? FwdTile{128, 64, 4}                                     // 64 KB: 2 blocks an SM
         : tiles == TileSet::kNarrow ? FwdTile{64, 32, 4}    // 64 KB: 128 KB would not fit
                                     : FwdTile{128, 64, 8};  // 128 KB: 1 block an SM
}

// The forward on Hopper: consumers are warpgroups of 64 rows each, block_n the keys of a tile, and stages those of K
// and of V that fit beside Q into the 227 KB of a thread block, or into half of that if two share an SM.
struct Sm90FwdTile {
  int consumers, block_n;
  int stages = 2, blocks_per_sm = 1;
  constexpr int block_m() const { return 64 * consumers; }
};
// Head dimensions that have kernels of their own; others are rounded up to one of these. Rows of an odd number of 16
// bytes (72 and 88 columns) take TMA less time in two panels of 128 bytes than in three of 64.
constexpr int sm90_fwd_head_dim(int head_dim) {
  const bool suits_narrow_panels = head_dim % 16 == 0;
  return head_dim <= 64                          ? 64
         : head_dim <= 96 && suits_narrow_panels ? 96
         : head_dim <= 128                       ? 128
         : head_dim <= 192                       ? 192
                                                 : 256;
}
constexpr bool sm90_has_few_rows(int seqlen_q) { return seqlen_q <= 1024; }
// Chosen by sm90_fwd_shape(). At head_dim 64, tall row blocks hide a softmax that takes as long as the products,
// short ones are more in number, and of two thread blocks on an SM one computes while the other waits. Wide heads
// have tiles of few keys if these leave less of the last tile empty.
enum class Sm90FwdShape { kTall, kShort, kTwoBlocks, kFewKeys };
constexpr Sm90FwdTile sm90_fwd_tile(int d, Sm90FwdShape shape) {
  const bool has_few_keys = shape == Sm90FwdShape::kFewKeys;
  return d <= 64    ? (shape == Sm90FwdShape::kTall    ? Sm90FwdTile{3, 128}        // 112 KB
                       : shape == Sm90FwdShape::kShort ? Sm90FwdTile{2, 128}        // 96 KB
                                                       : Sm90FwdTile{2, 64, 3, 2})  // 96 KB, twice
         : d <= 96  ? Sm90FwdTile{2, 128}                                           // 144 KB
         : d <= 128 ? Sm90FwdTile{2, 128}                                           // 224 KB, with two of Q
         : d <= 192 ? (has_few_keys ? Sm90FwdTile{2, 64, 3} : Sm90FwdTile{2, 112})  // 192 KB; 216 KB
                    : (has_few_keys ? Sm90FwdTile{2, 64} : Sm90FwdTile{2, 80});     // 192 KB; 224 KB
}

// With a window of keys: the fewer rows a tile has, the fewer keys it computes that lie outside of the windows of its
// rows.
constexpr Sm90FwdTile sm90_window_fwd_tile(int head_dim_tile) {
  return sm90_fwd_tile(head_dim_tile, Sm90FwdShape::kTwoBlocks);
}

// With a bias, a dense mask or softcap. Two stages of the bias have to fit, too.
constexpr Sm90FwdTile sm90_general_fwd_tile(int head_dim_tile, bool is_tall = false) {
  return head_dim_tile <= 64    ? (is_tall ? Sm90FwdTile{3, 128}   // 208 KB
                                           : Sm90FwdTile{2, 128})  // 160 KB
         : head_dim_tile <= 128 ? Sm90FwdTile{2, 128}              // 224 KB
                                : Sm90FwdTile{2, 64};              // 224 KB
}
// With a bias for each row and key and nothing else, head_dim 64 has tall tiles, as without a bias. Not with a mask,
// under which fewer tall tiles are empty; not with fp32 tiles of a bias, as three consumers leave too few registers
// to read them ahead; and not with a window (see above). No kernel with tall tiles splits the keys.
constexpr bool sm90_general_fwd_is_tall(const FwdParams& p, int32_t shares) {
  return shares <= 1 && p.head_dim <= 64 && !sm90_has_few_rows(p.seqlen_q) && p.bias.kind == BiasKind::kTile &&
         !p.has_mask && p.window == 0 && p.softcap == 0.f && p.softmax_scale > 0.f;
}

// The forward on Hopper over lists of keys: two warpgroups of 64 rows each. For short lists an SM has two thread
// blocks, at head_dims at which the registers are enough.
struct Sm90ListTile {
  int block_n, stages;
  int blocks_per_sm = 1;
};
constexpr int kSm90ListRows = 128;
constexpr int kSm90ListWarps = 12;
// Head dimensions that have kernels of their own; others are rounded up to one of these.
constexpr int sm90_list_head_dim(int head_dim) {
  return head_dim <= 128 ? head_dim_tile(head_dim) : sm90_fwd_head_dim(head_dim);
}
// 16384 rows, 16 heads over 4: with two thread blocks on an SM lists of 1024 keys took 0.96 of the time, lists of
// 4096 keys 1.05. The list of a mask has no capacity yet when this is asked; it will have room for all keys.
constexpr bool sm90_lists_are_short(const FwdParams& p) {
  return p.head_dim <= 64 && p.num_splits <= 1 &&
         (p.seqlen_k <= 2048 || (p.keys.capacity > 0 && p.keys.capacity <= 2048));
}
constexpr Sm90ListTile sm90_list_tile(int d, bool is_short) {
  return d <= 64    ? (is_short ? Sm90ListTile{64, 4, 2}  // 96 KB, twice
                                : Sm90ListTile{128, 4})   // 160 KB
         : d <= 128 ? Sm90ListTile{128, 2}                // 192 KB
         : d <= 192 ? Sm90ListTile{96, 2}                 // 192 KB
                    : Sm90ListTile{64, 2};                // 192 KB
}

constexpr BwdTile bwd_tile(TileSet tiles, int d) {
  return d <= 64    ? (tiles == TileSet::kNarrow ? BwdTile{64, 128, 8, 2, 4, 2, 2}    // 96 KB
                                                 : BwdTile{128, 128, 8, 4, 4, 4, 2})  // 144 KB
         : d <= 128 ? (tiles == TileSet::kNarrow ? BwdTile{64, 64, 8, 2, 2, 2, 1}     // 80 KB
                                                 : BwdTile{64, 128, 8, 2, 4, 2, 2})   // 144 KB
                    : (tiles == TileSet::kNarrow ? BwdTile{32, 32, 4, 2, 2, 2, 1}     // 68 KB
                                                 : BwdTile{64, 64, 8, 4, 2, 2, 1});   // 144 KB
}

// The backward on Hopper: two consumers of 64 keys each. If block_m is not a multiple of 64, dq is computed
// transposed. A tile of 96 rows is possible for neither lists, which are for blocks of 128 rows, nor a call that is
// in_64_rows: one with a dense mask, whose states are those of 64 rows, or with a window, which has the same kernels;
// with packed sequences, whose lse and delta (kRowPitch) have room for whole blocks of 64 rows; or one whose kernel
// writes the rows of dq, which must not be transposed. A dense bias has two stages at head_dim 128, of 16 KB or in
// fp32 of 32 KB, and three at 64. Wide heads take a cluster of two thread blocks with two consumers each; the
// consumers of a thread block have the same 64 keys and compute different products.
constexpr BwdTile sm90_bwd_tile(int d, bool gathered, bool has_bias, bool in_64_rows) {
  return d <= 64 && !gathered && !has_bias && !in_64_rows ? BwdTile{96, 128, 8, 1, 8, 4, 3}
         // 162 KB: 472 TFLOP/s on an H200, 438 with 64 rows
         : d > 128                         ? BwdTile{64, 128, 16, 1, 8, 4, 2, 2}  // 226 KB
         : d > 64 && !gathered && has_bias ? BwdTile{64, 128, 8, 1, 8, 4, 2}      // 227 KB
                                           : BwdTile{64, 128, 8, 1, 8, 4, 3};     // 211 KB
}

// Decoding: each of the `warps` warps of a thread block goes through keys of its own, kDecodeKeys at a time, with up
// to `stages` such steps being loaded. A thread block has up to kDecodeRows rows, which are those of one matrix
// instruction.
struct DecodeTile {
  int warps, stages;
};
constexpr int kDecodeRows = 16;
constexpr int kDecodeKeys = 16;
// The rows of several tokens, of a draft or of a call, are in one thread block and read K and V together:
// token_rows() at most. The sums of 32 rows fit the registers up to head_dim 128.
constexpr int kMaxDraft = 32;
constexpr int token_rows(int d) { return d <= 128 ? 32 : 16; }

// The bytes in flight decide the speed: about 32 KB for each SM hide the latency of an H200's memory. At most 99 KB.
constexpr DecodeTile decode_tile(int d) {
  return d <= 64    ? DecodeTile{4, 4}   // 64 KB
         : d <= 128 ? DecodeTile{4, 3}   // 96 KB
                    : DecodeTile{2, 3};  // 96 KB
}
// Parts into which the keys of a row block can be split.
constexpr int32_t kMaxSplits = 128;
constexpr int decode_smem_bytes(int d) {
  return decode_tile(d).warps * decode_tile(d).stages * 2 * kDecodeKeys * head_dim_tile(d) * 2;
}

// Which kernel of a unit a launch takes, and with how many thread blocks: decided by the plans in src/host/plan.
struct KernelChoice {
  TileSet tiles = TileSet::kWide;
  Level level = Level::kPlain;
  int64_t blocks = 0;
  // The tile that the plan has chosen, for a forward or a backward. A launch for Hopper finds its tile by itself, and
  // is refused if it finds another one.
  FwdTile fwd_tile = {};
  BwdTile bwd_tile = {};
};

}  // namespace dmattn
