// Shapes, layouts and the shared memory of the Hopper backward kernel.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "../../helper_params.h"
#include "../../tiles.h"
#include "../shared/scores.cuh"
#include "bias_rows.cuh"
#include "packed.cuh"
#include "pipeline.cuh"

namespace dmattn::sm90 {

// How a tile of dq leaves the registers.
enum class DqPath {
  kVector,  // 16-byte reductions of each thread, straight to global memory
  kBulk,    // through shared memory, by the bulk copy engine
  kTurns,   // through shared memory, by a warp of the first warpgroup, which can keep a fixed order: see BwdDq
  kRows,    // rounded, to rows of dq itself: no other item adds to them
};

// The kernels of a head dimension.
enum class BwdVariant {
  kPlain,
  kOrdered,    // as kPlain, but dq can be added up in a fixed order
  kSoftcap,    // softcap; dq can be added up in a fixed order, too
  kMask,       // a dense mask, or a window of keys (for wide heads see kWindow)
  kDenseBias,  // a 16-bit bias for each row and key, and its gradient, also beside a mask or a window. For wide heads
               // the bias may be fp32.
  kWideBias,   // an fp32 bias for each row and key, and its gradient
  kKeyBias,    // a bias for each key, and its gradient, without mask and window
  kMaskedKeyBias,  // the same beside a mask or a window; wide heads also have it where sums are in a fixed order
  kLists,          // lists of keys
  kBiasLists,      // lists of keys with a bias for each key, and its gradient
  kOrderedLists,   // as kLists, with all sums in a fixed order
  kOrderedBiasLists,
  kPacked,    // as kPlain, over packed sequences
  kPairBias,  // as kDenseBias, without mask and window: an item has two heads or batches that share the bias
  // As kDenseBias and kWideBias, where rows of the gradient do not start on 16 bytes. kDenseBiasRows also takes a bias
  // with such rows that has no gradient. The code that writes such a gradient costs the consumers registers, so that
  // it is in kernels of its own.
  kDenseBiasRows,
  kWideBiasRows,
  kFewKeys,        // as kPlain, where all keys of a head fit one tile
  kPackedOrdered,  // over packed sequences, and dq can be added up in a fixed order
  kPackedSoftcap,  // over packed sequences with softcap, and dq can, too
  // As the kernels without "Ordered" in their names, but dq is added up in a fixed order.
  kMaskOrdered,
  kDenseBiasOrdered,
  kWideBiasOrdered,
  kKeyBiasOrdered,
  kWindow,       // wide heads: a window of keys
  kFewKeysMask,  // as kFewKeys, with a dense mask
};

// A block of keys of a packed sequence; n_block counts within the sequence. Consumers read this in shared memory until
// they are done with the item, to save registers.
struct PackedItem {
  int32_t index, n_block, head_k, sequence;
  SeqRange q, k;
};

// A block of rows that meets the keys of an item, as the producer announces it beside Q in kernels with kMasked.
struct RowTile {
  uint32_t word;
  int32_t head;

  static __device__ __forceinline__ RowTile of(int head, int m, bool is_cut, bool is_partial) {
    return {static_cast<uint32_t>(m) << 3 | static_cast<uint32_t>(is_partial) << 1 | static_cast<uint32_t>(is_cut),
            head};
  }
  // What follows the last tile of an item.
  static __device__ __forceinline__ RowTile none() { return {0, -1}; }
  __device__ __forceinline__ bool exists() const { return head >= 0; }
  __device__ __forceinline__ int m() const { return static_cast<int>(word >> 3); }
  // Causality, a window or the end of the keys hides some of the tile's scores.
  __device__ __forceinline__ bool is_cut() const { return word & 1; }
  // The mask hides some of the tile's scores.
  __device__ __forceinline__ bool is_partial() const { return word & 2; }
  __device__ __forceinline__ bool is_checked() const { return word & 3; }
  __device__ __forceinline__ bool is_last() const { return word & 4; }
  __device__ __forceinline__ RowTile as_last(bool is_last) const {
    return {word | static_cast<uint32_t>(is_last) << 2, head};
  }
};

// dq = ds * k, computed by all consumers, each of which has 64 rows of the product. Consumers that have the same 64
// rows divide their columns between them. Where kBlockM is no multiple of 64, the product is transposed.
template <int kBlockM, int kHeadDim, int kConsumers>
struct DqTile {
  static constexpr bool kTransposed = kBlockM % 64 != 0;
  static constexpr int kRows = kTransposed ? kHeadDim : kBlockM, kCols = kTransposed ? kBlockM : kHeadDim;
  static constexpr int kAtomsM = kRows / 64, kAtomsN = kConsumers / kAtomsM;
  static constexpr int kColsOfOne = kCols / kAtomsN;
  static_assert(kAtomsM * 64 == kRows && kAtomsM * kAtomsN == kConsumers && kColsOfOne % 8 == 0);
  static constexpr int kFragments = kColsOfOne / 8;  // of 64 x 8 elements, four registers a thread
  static constexpr int kPart = 64 * kColsOfOne;      // elements that a consumer has

  // In memory: [consumer][fragment][thread of the warpgroup][register], see DqOrder.
};

// The stage of K and V that an item uses. If there is only one, its number is a constant.
template <int kStages>
struct KvPlace : RingPlace<kStages> {};
template <>
struct KvPlace<1> {
  static constexpr int stage = 0;
  int phase = 0;

  __device__ __forceinline__ void advance() { phase ^= 1; }
};

template <class Element_, int kHeadDim_, BwdVariant kVariant>
struct BwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kTileDim = kHeadDim;
  static constexpr int kConsumers = 2, kCluster = 1;
  static constexpr bool kListBias = kVariant == BwdVariant::kBiasLists || kVariant == BwdVariant::kOrderedBiasLists;
  static constexpr bool kMaskedKeyBias =
      kVariant == BwdVariant::kMaskedKeyBias || kVariant == BwdVariant::kKeyBiasOrdered;
  static constexpr bool kOwnKeyBias = kMaskedKeyBias || kVariant == BwdVariant::kKeyBias;
  static constexpr bool kKeyBias = kListBias || kOwnKeyBias;
  static constexpr bool kWideBias = kVariant == BwdVariant::kWideBias || kVariant == BwdVariant::kWideBiasRows ||
                                    kVariant == BwdVariant::kWideBiasOrdered;
  static constexpr bool kAlignedNarrowBias =
      kVariant == BwdVariant::kDenseBias || kVariant == BwdVariant::kDenseBiasOrdered;
  static constexpr bool kNarrowBias = kAlignedNarrowBias || kVariant == BwdVariant::kDenseBiasRows;
  // An item is a block of keys of two kv heads or batches, its members, whose steps alternate.
  static constexpr bool kPairs = kVariant == BwdVariant::kPairBias;
  static constexpr int kMembers = kPairs ? 2 : 1;
  static constexpr bool kDenseBias = kNarrowBias || kWideBias || kPairs;
  static constexpr bool kDbiasRows = kVariant == BwdVariant::kDenseBiasRows || kVariant == BwdVariant::kWideBiasRows;
  // The producer announces each step (RowTile). Beside an fp32 bias there is no room for tiles of a mask: a mask is
  // then the same for all rows, and consumers read it from memory (HiddenKeys).
  static constexpr bool kMasked = kVariant == BwdVariant::kMask || kVariant == BwdVariant::kMaskOrdered ||
                                  kVariant == BwdVariant::kFewKeysMask || kNarrowBias || kMaskedKeyBias;
  static constexpr bool kWindows = kMasked && kVariant != BwdVariant::kFewKeysMask;  // rows may see a window of keys
  static constexpr bool kBias = kKeyBias || kDenseBias;
  static constexpr bool kGathered =
      kListBias || kVariant == BwdVariant::kLists || kVariant == BwdVariant::kOrderedLists;
  static constexpr bool kPacked = kVariant == BwdVariant::kPacked || kVariant == BwdVariant::kPackedOrdered ||
                                  kVariant == BwdVariant::kPackedSoftcap;
  static constexpr bool kFewKeys = kVariant == BwdVariant::kFewKeys || kVariant == BwdVariant::kFewKeysMask;
  // Items may be numbered in pairs: see find_mirrored_item().
  static constexpr bool kMirrors =
      kVariant == BwdVariant::kPlain || kVariant == BwdVariant::kPacked || kVariant == BwdVariant::kKeyBias;
  static constexpr BwdTile kTile =
      sm90_bwd_tile(kHeadDim, kGathered, kDenseBias || kMaskedKeyBias, kMasked || kPacked || kFewKeys);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;  // query rows; keys, 64 for each consumer
  static constexpr int kOwnKeys = kBlockN;                                // keys that TMA copies in one piece
  static_assert(kBlockN == 64 * kConsumers && kTile.warps == 4 * kConsumers && kTile.warps_m_dq == 4);
  static constexpr int kStagesQ = kTile.stages_q, kStagesdO = 2, kStagesdS = 2;
  // Where there is room for a second stage, listed keys of the next item are copied during the last steps of this one.
  // Copies during the additions to dk and dv would wait behind these.
  static constexpr int kStagesKv = kGathered && kHeadDim == 64 ? 2 : 1;
  static constexpr bool kSoftcap = kVariant == BwdVariant::kSoftcap || kVariant == BwdVariant::kPackedSoftcap;
  static constexpr bool kOrdered = kSoftcap || kVariant == BwdVariant::kOrdered ||
                                   kVariant == BwdVariant::kPackedOrdered || kVariant == BwdVariant::kOrderedLists ||
                                   kVariant == BwdVariant::kOrderedBiasLists;
  // On an H200, bulk copies are up to 4% faster at head_dim 128; at 64 they have not been timed. With a dense bias,
  // waiting for bulk copies of dq would include waiting for those of dbias, and the other way round.
  static constexpr DqPath kDqPath = kOrdered                       ? DqPath::kTurns
                                    : kFewKeys                     ? DqPath::kRows
                                    : kHeadDim == 64 || kDenseBias ? DqPath::kVector
                                                                   : DqPath::kBulk;
  // Scores of the next rows are started before dq leaves the registers, where there are registers for both.
  static constexpr bool kEarlyScores = !kSoftcap && !(kVariant == BwdVariant::kFewKeysMask && kHeadDim > 64);
  static_assert(kBlockM % 16 == 0 && kStagesQ >= 2 && kStagesdO >= 2);
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // 128 * (2 * 240 + 24) = 64512 registers: those that a block of 384 threads starts with, 168 each.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kGatherWarps = kGathered ? kConsumers : 0;     // the last warps of the first warpgroup
  static constexpr int kDqWarps = kDqPath == DqPath::kTurns ? 1 : 0;  // the second warp of the first warpgroup
  static_assert(1 + kDqWarps + kGatherWarps <= 4);
  // dq is added up in a fixed order beside a mask or a bias: each consumer has a warp that takes its turns, see
  // DqTurns. So these warps cannot copy a bias whose rows do not start on 16 bytes.
  static constexpr bool kHasTurnWarps =
      kVariant == BwdVariant::kMaskOrdered || kVariant == BwdVariant::kDenseBiasOrdered ||
      kVariant == BwdVariant::kWideBiasOrdered || kVariant == BwdVariant::kKeyBiasOrdered;
  static constexpr int kTurnWarps = kHasTurnWarps ? kConsumers : 0;
  static constexpr bool kCopiesBiasRows = kDenseBias && !kPairs && !kHasTurnWarps;
  // TMA copies panels as wide as the swizzle of shared memory: 128 bytes, or 64 where head_dim is no multiple of that.
  static constexpr int kPanelCols = kHeadDim % 64 == 0 ? 64 : 32;
  static constexpr int kPanels = kHeadDim / kPanelCols;

  template <cute::GMMA::Major kMajor>
  using Atom = cute::conditional_t<kMajor == cute::GMMA::Major::K,
                                   cute::conditional_t<kPanelCols == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                                       cute::GMMA::Layout_K_SW64_Atom<Element>>,
                                   cute::conditional_t<kPanelCols == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                                       cute::GMMA::Layout_MN_SW64_Atom<Element>>>;
  // kStages tiles of kRows rows as TMA writes them; and the same memory seen as [head_dim][row].
  template <int kRows, int kStages>
  using Rows = decltype(cute::tile_to_shape(Atom<cute::GMMA::Major::K>{},
                                            cute::Shape<Int<kRows>, Int<kHeadDim>, Int<kStages>>{}));
  template <int kRows, int kStages>
  using Columns = decltype(cute::tile_to_shape(Atom<cute::GMMA::Major::MN>{},
                                               cute::Shape<Int<kHeadDim>, Int<kRows>, Int<kStages>>{},
                                               cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using LayoutK =
      decltype(cute::tile_to_shape(Atom<cute::GMMA::Major::K>{}, cute::Shape<Int<kBlockN>, Int<kHeadDim>>{}));
  using LayoutKt = decltype(cute::tile_to_shape(
      Atom<cute::GMMA::Major::MN>{}, cute::Shape<Int<kHeadDim>, Int<kBlockN>>{}, cute::Step<cute::_2, cute::_1>{}));
  using LayoutQ = Rows<kBlockM, kStagesQ>;
  using LayoutQt = Columns<kBlockM, kStagesQ>;
  using LayoutdO = Rows<kBlockM, kStagesdO>;
  using LayoutdOt = Columns<kBlockM, kStagesdO>;
  // ds lies as [row][key], a panel of 64 keys a consumer.
  using LayoutdS = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                                cute::Shape<Int<kBlockM>, Int<kBlockN>, Int<kStagesdS>>{}));
  using LayoutOut = decltype(cute::tile_to_shape(Atom<cute::GMMA::Major::K>{}, cute::Shape<Int<64>, Int<kHeadDim>>{}));

  static constexpr cute::GMMA::Major kK = cute::GMMA::Major::K, kMN = cute::GMMA::Major::MN;
  using AlongKeys = cute::Layout<cute::Shape<Int<kConsumers>, cute::_1, cute::_1>>;
  // [key][row] = k q^T and v do^T.
  using ScoreMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<Int<kBlockN>, Int<kBlockM>, Int<kHeadDim>>>(),
      AlongKeys{}));
  // [key][head_dim] += p^T do and ds^T q, the first operand from registers.
  using GradAtom =
      decltype(cute::GMMA::rs_op_selector<Element, Element, float,
                                          cute::Shape<Int<kBlockN>, Int<kHeadDim>, Int<kBlockM>>, kK, kMN>());
  using GradMma = decltype(cute::make_tiled_mma(GradAtom{}, AlongKeys{}));
  using OneGradMma = decltype(cute::make_tiled_mma(GradAtom{}));  // of one consumer
  // [row][head_dim] = ds k, or [head_dim][row] = k^T ds^T.
  using Dq = DqTile<kBlockM, kHeadDim, kConsumers>;
  using DqShape = cute::Shape<Int<64>, Int<Dq::kColsOfOne>, Int<kBlockN>>;
  using DqMma =
      decltype(cute::make_tiled_mma(cute::conditional_return<Dq::kTransposed>(
                                        cute::GMMA::ss_op_selector<Element, Element, float, DqShape, kMN, kK>(),
                                        cute::GMMA::ss_op_selector<Element, Element, float, DqShape, kK, kMN>()),
                                    cute::Layout<cute::Shape<Int<Dq::kAtomsM>, Int<Dq::kAtomsN>, cute::_1>>{}));
  // One instruction covers a tile's width: see FwdTraits.
  static_assert(cute::size<1>(typename ScoreMma::AtomShape_MNK{}) == kBlockM);
  static_assert(cute::size<1>(typename GradMma::AtomShape_MNK{}) == kHeadDim);
  static_assert(cute::size<1>(typename DqMma::AtomShape_MNK{}) == Dq::kColsOfOne);

  static constexpr int kTileQ = kBlockM * kHeadDim, kTileK = kBlockN * kHeadDim, kTiledS = kBlockM * kBlockN;
  static constexpr int kPanel = kBlockM * 64;  // elements of ds or of the bias that a consumer has
  // What a consumer collects in shared memory before it leaves by bulk copy: its 64 rows of dk or dv, or its part of
  // dq.
  static constexpr int kOutBytes = 64 * kHeadDim * 2;
  static constexpr int kStageBytes =
      (kDqPath == DqPath::kBulk || kDqPath == DqPath::kTurns) && Dq::kPart * 4 > kOutBytes ? Dq::kPart * 4 : kOutBytes;
  // A second stage lets consumers go on for a step more while a tile of dq waits for its turn.
  static constexpr int kStagesOut = kDqPath == DqPath::kTurns && kHeadDim == 64 ? 2 : 1;
  static_assert(kDqPath != DqPath::kTurns || kStageBytes == Dq::kPart * 4);  // BwdDq adds both parts in one piece

  // An item as the producer announces it. An index of `items` or more: there are no more items. m_begin, m_end: see
  // BwdItem.
  struct TiledItem {
    int32_t index;
  };
  struct ListedItem {
    int32_t index, m_begin, m_end, heads;  // heads: the word of HeadShare
  };
  struct MaskedItem {
    int32_t index, has_rows;  // has_rows: whether the mask leaves any rows
  };
  using Announced =
      std::conditional_t<kGathered, ListedItem,
                         std::conditional_t<kMasked, MaskedItem, std::conditional_t<kPacked, PackedItem, TiledItem>>>;
  // What the list says about the keys of a tile.
  struct NoFacts {};
  struct NoTerm {};
  struct KeyTerm {
    alignas(16) int32_t term[kBlockN];  // the key's row of ChunkTerms; -1: none
  };
  struct KeyFacts : std::conditional_t<kOrdered, KeyTerm, NoTerm> {
    // The key, and how many positions from its own on see it: 0 where there is no key. With BwdArguments::all_rows_see
    // it is the number of rows, counted from the first one.
    alignas(16) KeyInterval interval[kBlockN];
    alignas(16) float bias[kListBias ? kBlockN : 4];
    int2 seen_by_all[kConsumers];  // rows at positions from x up to y see all keys of the consumer
  };
  using Facts = std::conditional_t<kGathered, KeyFacts, NoFacts>;

  // What comes with a stage of Q in kernels with kMasked: which rows these are, and, if the mask hides some of the
  // tile, the mask's bits of the block's keys, 16 bytes for each row.
  struct NoMask {};
  static constexpr int kMaskWords = kBlockN / 32;
  struct MaskTile {
    alignas(128) uint32_t bits[kStagesQ][kBlockM * kMaskWords];
    alignas(8) RowTile tile[kStagesQ];
  };
  static_assert(!kMasked || (kMaskWords == 4 && kBlockM == kMaskBand));

  // Tiles of a dense bias, in panels of 128 bytes a row, swizzled. Each is in the stage of its Q or, for both members
  // of a pair, in a stage of its own. Tiles of an fp32 bias are overwritten with their gradient.
  static constexpr int kStagesBias = kPairs ? 2 : kStagesQ;
  // How many of the four parts of a thread's 16-bit bias are read while the scores are computed. Read between the
  // scores and their exponentials, each part would wait for the one before. The other kernels have no registers for
  // this.
  static constexpr int kBiasAhead = kAlignedNarrowBias && kHeadDim <= 64 ? 4 : 0;
  using BiasElement = std::conditional_t<kWideBias, float, Element>;
  static constexpr int kBiasPanelKeys = 128 / sizeof(BiasElement), kBiasPanels = kBlockN / kBiasPanelKeys;
  static constexpr int kBiasPanel = kBlockM * kBiasPanelKeys;
  struct NoBias {};
  struct BiasTiles {
    alignas(1024) BiasElement tiles[kStagesBias * kTiledS];
  };
  // The gradient of a pair's tile before TMA takes it: in 16 bits in the layout of ds, or in fp32 in that of an fp32
  // bias.
  struct PairBiasTiles : BiasTiles {
    alignas(1024) float dbias[kTiledS];
  };

  // kDenseBiasRows: the 16 bytes behind each row of a tile of the bias, for BwdBiasLoader, in the first chunk of a row
  // of 128 bytes.
  static constexpr bool kShiftsBias = kVariant == BwdVariant::kDenseBiasRows;
  struct NoTails {};
  struct BiasTails {
    alignas(1024) char bias_tails[kBlockM * 128];
  };

  // dk and dv are written to shared memory after the last ds of an item. With a dense bias at head_dim 128 they are
  // written where ds was.
  static constexpr bool kOwnOut = !kDenseBias || kHeadDim <= 64;
  struct OwnOut {
    alignas(1024) Element ds[kStagesdS * kTiledS];
    alignas(1024) char out[kStagesOut][kConsumers][kStageBytes];
  };
  struct OutInPlaceOfdS {
    union {
      alignas(1024) Element ds[kStagesdS * kTiledS];
      alignas(1024) char out[kStagesOut][kConsumers][kStageBytes];
    };
  };
  static_assert(kOwnOut || kStagesOut * kConsumers * kStageBytes <= kStagesdS * kTiledS * 2);

  // The operands come first. With something else before K, ptxas kept the addresses of lists' operands in registers of
  // each thread instead of uniform registers, and read 37 words from local memory in a step instead of 6.
  struct Operands {
    alignas(1024) Element k[kStagesKv * kMembers * kTileK];
    alignas(1024) Element v[kStagesKv * kMembers * kTileK];
    alignas(1024) Element q[kStagesQ * kTileQ];
    alignas(1024) Element dout[kStagesdO * kTileQ];
  };
  struct Shared : Operands,
                  std::conditional_t<kOwnOut, OwnOut, OutInPlaceOfdS>,
                  std::conditional_t<kShiftsBias, BiasTails, NoTails> {
    std::conditional_t<kPairs, PairBiasTiles, std::conditional_t<kDenseBias, BiasTiles, NoBias>> bias;
    std::conditional_t<kMasked, MaskTile, NoMask> mask;
    alignas(128) float lse[kStagesQ][kBlockM];
    alignas(128) float delta[kStagesdO][kBlockM];
    alignas(128) float lse_rest[kStagesQ][kBias ? kBlockM : 4];
    std::conditional_t<kCopiesBiasRows, BiasRequests<kStagesQ>, NoBias> bias_requests;
    Facts facts[2];
    alignas(16) Announced item[2];
    int32_t tiles_before[kDqWarps > 0 && kGathered ? kMostChunkRows / kBlockM : 1];  // see BwdDq
    Barrier k_full[kStagesKv], v_full[kStagesKv], k_empty[kStagesKv], v_empty[kStagesKv];
    Barrier q_full[kStagesQ], q_empty[kStagesQ], dout_full[kStagesdO], dout_empty[kStagesdO];
    Barrier bias_full[kDenseBias ? kStagesBias : 1], bias_empty[kDenseBias ? kStagesBias : 1];
    Barrier item_full[2], item_empty[2], facts_full[2], facts_empty[2];
    Barrier out_full[kStagesOut], out_empty[kStagesOut];  // kTurns: of a stage with a tile of dq
    // kHasTurnWarps, for each consumer. With kVector: it may add its part of dq; it has added it. With kBulk: its
    // stage is free; its part of dq is there.
    Barrier turn_full[kConsumers], turn_used[kConsumers];
  };
  static constexpr uint32_t kSmemBytes = sizeof(Shared) + 1024;  // 1024: to align the base for the tiles
  static_assert(kSmemBytes <= 227 * 1024);
  // TMA and bulk copies need addresses that are aligned for the swizzle, or for the granularity of bulk copies.
  static_assert(kTileQ * 2 % 1024 == 0 && kTileK * 2 % 1024 == 0 && kTiledS * 2 % 1024 == 0);
  static_assert(kBlockM * kPanelCols * 2 % 512 == 0 && kStageBytes % 1024 == 0 && kBlockM * 4 % 16 == 0);
};

}  // namespace dmattn::sm90
