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
  kTurns,   // likewise, by a warp of the first warpgroup that has blocks of keys add in a fixed order: see BwdDq
  kRows,    // rounded, to rows of dq itself: nothing else is added to them
};

// The kernels of a head dimension.
enum class BwdVariant {
  kPlain,
  kOrdered,       // dq can be added up in a fixed order
  kSoftcap,       // dq can, too
  kMask,          // a dense mask, or a window of keys, which wide heads have a kernel of its own for
  kDenseBias,     // a 16-bit number that is added to each logit, and its gradient; a mask or a window, if there is one.
                  // Of wide heads it may be fp32.
  kWideBias,      // an fp32 number that is added to each logit, and its gradient
  kKeyBias,       // a number that is added to the logits of each key, and its gradient; likewise
  kLists,         // lists of keys
  kBiasLists,     // likewise, with a number that is added to the logits of each key, and its gradient
  kOrderedLists,  // all sums in a fixed order
  kOrderedBiasLists,
  kPacked,    // as kPlain, over packed sequences
  kPairBias,  // as kDenseBias, without mask and window: two heads or batches that share the bias and its gradient
  // With a gradient of the bias whose rows do not start on 16 bytes, or of 16 bits without one, of which rows of the
  // bias do not. What writes the gradient costs the consumers registers: the others go without.
  kDenseBiasRows,
  kWideBiasRows,
  kFewKeys,        // as kPlain, of keys that fit one tile
  kPackedOrdered,  // over packed sequences, and dq can be added up in a fixed order
  kPackedSoftcap,  // over packed sequences with softcap, and dq can, too
  // As those without this in their names, but dq is added up in a fixed order.
  kMaskOrdered,
  kDenseBiasOrdered,
  kWideBiasOrdered,
  kKeyBiasOrdered,
  kWindow,       // of wide heads: a window of keys
  kFewKeysMask,  // as kFewKeys, with a dense mask
};

// A block of keys of a packed sequence, in which n_block counts. Consumers read it in shared memory until they are done
// with it, to save registers.
struct PackedItem {
  int32_t index, n_block, head_k, sequence;
  SeqRange q, k;
};

// A block of rows that meets the keys of an item, as the producer announces it beside Q where there is a dense mask.
struct RowTile {
  uint32_t word;
  int32_t head;

  static __device__ __forceinline__ RowTile of(int head, int m, bool is_cut, bool is_partial) {
    return {static_cast<uint32_t>(m) << 3 | static_cast<uint32_t>(is_partial) << 1 | static_cast<uint32_t>(is_cut),
            head};
  }
  // After the last tile of an item.
  static __device__ __forceinline__ RowTile none() { return {0, -1}; }
  __device__ __forceinline__ bool exists() const { return head >= 0; }
  __device__ __forceinline__ int m() const { return static_cast<int>(word >> 3); }
  // Rows meet keys that they do not see by causality, or keys past the last one.
  __device__ __forceinline__ bool is_cut() const { return word & 1; }
  // The mask leaves some of it.
  __device__ __forceinline__ bool is_partial() const { return word & 2; }
  __device__ __forceinline__ bool is_checked() const { return word & 3; }
  // The item has no more.
  __device__ __forceinline__ bool is_last() const { return word & 4; }
  __device__ __forceinline__ RowTile as_last(bool is_last) const {
    return {word | static_cast<uint32_t>(is_last) << 2, head};
  }
};

// dq = ds * k by both consumers, each with 64 rows of the product. Where there are no 64 * n rows of queries, the
// product is transposed; where there are 64 only, the consumers share the other dimension.
template <int kBlockM, int kHeadDim, int kConsumers>
struct DqTile {
  static constexpr bool kTransposed = kBlockM % 64 != 0;
  static constexpr int kRows = kTransposed ? kHeadDim : kBlockM, kCols = kTransposed ? kBlockM : kHeadDim;
  static constexpr int kAtomsM = kRows / 64, kAtomsN = kConsumers / kAtomsM;
  static constexpr int kColsOfOne = kCols / kAtomsN;
  static_assert(kAtomsM * 64 == kRows && kAtomsM * kAtomsN == kConsumers && kColsOfOne % 8 == 0);
  static constexpr int kFragments = kColsOfOne / 8;  // of 64 x 8; four registers a thread
  static constexpr int kPart = 64 * kColsOfOne;      // elements of a consumer

  // In memory: [consumer][fragment][thread of the warpgroup][register], see DqOrder.
};

// The stage of K and V that an item has. Where there is but one, its number is no variable.
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
  static constexpr bool kOwnKeyBias = kVariant == BwdVariant::kKeyBias || kVariant == BwdVariant::kKeyBiasOrdered;
  static constexpr bool kKeyBias = kListBias || kOwnKeyBias;
  static constexpr bool kWideBias = kVariant == BwdVariant::kWideBias || kVariant == BwdVariant::kWideBiasRows ||
                                    kVariant == BwdVariant::kWideBiasOrdered;
  static constexpr bool kAlignedNarrowBias =
      kVariant == BwdVariant::kDenseBias || kVariant == BwdVariant::kDenseBiasOrdered;
  static constexpr bool kNarrowBias = kAlignedNarrowBias || kVariant == BwdVariant::kDenseBiasRows;
  // An item is a block of keys of two heads or batches, its members, which take their steps by turns.
  static constexpr bool kPairs = kVariant == BwdVariant::kPairBias;
  static constexpr int kMembers = kPairs ? 2 : 1;
  static constexpr bool kDenseBias = kNarrowBias || kWideBias || kPairs;
  static constexpr bool kDbiasRows = kVariant == BwdVariant::kDenseBiasRows || kVariant == BwdVariant::kWideBiasRows;
  // Steps are announced. In fp32 the tiles of a bias leave no room for a mask's: there it is the same for all rows.
  static constexpr bool kMasked = kVariant == BwdVariant::kMask || kVariant == BwdVariant::kMaskOrdered ||
                                  kVariant == BwdVariant::kFewKeysMask || kNarrowBias || kOwnKeyBias;
  static constexpr bool kWindows = kMasked && kVariant != BwdVariant::kFewKeysMask;  // rows may see a window of keys
  static constexpr bool kBias = kKeyBias || kDenseBias;
  static constexpr bool kGathered =
      kListBias || kVariant == BwdVariant::kLists || kVariant == BwdVariant::kOrderedLists;
  static constexpr bool kPacked = kVariant == BwdVariant::kPacked || kVariant == BwdVariant::kPackedOrdered ||
                                  kVariant == BwdVariant::kPackedSoftcap;
  static constexpr bool kFewKeys = kVariant == BwdVariant::kFewKeys || kVariant == BwdVariant::kFewKeysMask;
  // Items may be numbered two by two.
  static constexpr bool kMirrors = kVariant == BwdVariant::kPlain || kVariant == BwdVariant::kPacked;
  static constexpr BwdTile kTile = sm90_bwd_tile(kHeadDim, kGathered, kBias, kMasked || kPacked || kFewKeys);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;  // rows of queries; keys, 64 a consumer
  static constexpr int kOwnKeys = kBlockN;                                // keys that TMA copies in one piece
  static_assert(kBlockN == 64 * kConsumers && kTile.warps == 4 * kConsumers && kTile.warps_m_dq == 4);
  static constexpr int kStagesQ = kTile.stages_q, kStagesdO = 2, kStagesdS = 2;
  // Listed keys of the next item are copied beside the last steps of this one, where there is room. Beside the
  // additions to dk and dv they would wait for these.
  static constexpr int kStagesKv = kGathered && kHeadDim == 64 ? 2 : 1;
  // On an H200, bulk copies are up to 4% faster at head_dim 128; at 64 they have not been timed.
  // With a dense bias they would wait for each other's and dbias's.
  static constexpr bool kSoftcap = kVariant == BwdVariant::kSoftcap || kVariant == BwdVariant::kPackedSoftcap;
  static constexpr bool kOrdered = kSoftcap || kVariant == BwdVariant::kOrdered ||
                                   kVariant == BwdVariant::kPackedOrdered || kVariant == BwdVariant::kOrderedLists ||
                                   kVariant == BwdVariant::kOrderedBiasLists;
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
  static constexpr int kGatherWarps = kGathered ? kConsumers : 0;     // of the first warpgroup, its last ones
  static constexpr int kDqWarps = kDqPath == DqPath::kTurns ? 1 : 0;  // likewise, its second one
  static_assert(1 + kDqWarps + kGatherWarps <= 4);
  // dq is added up in a fixed order beside a mask or a bias: each consumer has a warp that takes its turns, see
  // DqTurns. A bias whose rows start anywhere needs these warps to copy them.
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
  // A tile of kRows rows as TMA writes it, kStages of them; and the same memory seen as [head_dim][row].
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
  // What a consumer puts together before it leaves by TMA: its 64 rows of dk or dv, or its part of dq.
  static constexpr int kOutBytes = 64 * kHeadDim * 2;
  static constexpr int kStageBytes =
      (kDqPath == DqPath::kBulk || kDqPath == DqPath::kTurns) && Dq::kPart * 4 > kOutBytes ? Dq::kPart * 4 : kOutBytes;
  // A second stage lets consumers go on for a step more while a tile of dq waits for its turn.
  static constexpr int kStagesOut = kDqPath == DqPath::kTurns && kHeadDim == 64 ? 2 : 1;
  static_assert(kDqPath != DqPath::kTurns || kStageBytes == Dq::kPart * 4);  // a tile leaves in one piece

  // An item as the producer announces it; an index of `items` and more: there is none. m_begin, m_end: see BwdItem.
  struct TiledItem {
    int32_t index;
  };
  struct ListedItem {
    int32_t index, m_begin, m_end, heads;  // heads: the word of HeadShare
  };
  struct MaskedItem {
    int32_t index, has_rows;  // has_rows: the mask leaves any
  };
  using Announced =
      std::conditional_t<kGathered, ListedItem,
                         std::conditional_t<kMasked, MaskedItem, std::conditional_t<kPacked, PackedItem, TiledItem>>>;
  // What is known of the keys of a tile.
  struct NoFacts {};
  struct NoTerm {};
  struct KeyTerm {
    alignas(16) int32_t term[kBlockN];  // the key's row of ChunkTerms; -1: none
  };
  struct KeyFacts : std::conditional_t<kOrdered, KeyTerm, NoTerm> {
    // The key, and how many positions from its own on see it: none where there is no key. Where all rows see all keys
    // of a list it is the number of rows, from the first one on.
    alignas(16) KeyInterval interval[kBlockN];
    alignas(16) float bias[kListBias ? kBlockN : 4];
    int2 seen_by_all[kConsumers];  // positions from x up to y see all keys of the consumer
  };
  using Facts = std::conditional_t<kGathered, KeyFacts, NoFacts>;

  // What comes with a stage of Q where there is a dense mask: which rows these are, and, if the mask leaves some of the
  // tile, its bits of the block's keys, a row of 16 bytes for each row.
  struct NoMask {};
  static constexpr int kMaskWords = kBlockN / 32;
  struct MaskTile {
    alignas(128) uint32_t bits[kStagesQ][kBlockM * kMaskWords];
    alignas(8) RowTile tile[kStagesQ];
  };
  static_assert(!kMasked || (kMaskWords == 4 && kBlockM == kMaskBand));

  // Tiles of a dense bias, each in panels of 128 bytes a row, swizzled. Each comes and goes with a stage of Q, or, for
  // both members of a pair, with a stage of its own. Those in fp32 become tiles of its gradient.
  static constexpr int kStagesBias = kPairs ? 2 : kStagesQ;
  // Parts of a thread's 16-bit numbers, of four, that are read while the scores are computed. Where they are read
  // between the scores and their exponents, each part waits for the one before. Elsewhere there are no registers for
  // it.
  static constexpr int kBiasAhead = kAlignedNarrowBias && kHeadDim <= 64 ? 4 : 0;
  using BiasElement = std::conditional_t<kWideBias, float, Element>;
  static constexpr int kBiasPanelKeys = 128 / sizeof(BiasElement), kBiasPanels = kBlockN / kBiasPanelKeys;
  static constexpr int kBiasPanel = kBlockM * kBiasPanelKeys;
  struct NoBias {};
  struct BiasTiles {
    alignas(1024) BiasElement tiles[kStagesBias * kTiledS];
  };
  // The gradient of a pair's tile on its way out: in 16 bits as ds lies, or in fp32 as a bias in fp32 does.
  struct PairBiasTiles : BiasTiles {
    alignas(1024) float dbias[kTiledS];
  };

  // With kDenseBiasRows, of BwdBiasLoader: what comes behind each row of the bias, in the first chunk of a row of its
  // own.
  static constexpr bool kShiftsBias = kVariant == BwdVariant::kDenseBiasRows;
  struct NoTails {};
  struct BiasTails {
    alignas(1024) char bias_tails[kBlockM * 128];
  };

  // dk and dv leave after the last ds of an item. With a dense bias at head_dim 128 they lie where the ds have been.
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

  // The operands come first: with something else before K, ptxas kept the addresses of lists' products in each thread
  // instead of once a warp, and read 37 words from local memory in a step instead of 6.
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
    Barrier out_full[kStagesOut], out_empty[kStagesOut];  // of a tile of dq, by kTurns
    // With kHasTurnWarps, of a consumer's step at dq: kVector: it may add its part; it has. kBulk: the stage is free;
    // the part lies there.
    Barrier turn_full[kConsumers], turn_used[kConsumers];
  };
  static constexpr uint32_t kSmemBytes = sizeof(Shared) + 1024;  // the base need not be aligned as the tiles must be
  static_assert(kSmemBytes <= 227 * 1024);
  // TMA and bulk copies go to addresses that the swizzle, or their own granularity, asks for.
  static_assert(kTileQ * 2 % 1024 == 0 && kTileK * 2 % 1024 == 0 && kTiledS * 2 % 1024 == 0);
  static_assert(kBlockM * kPanelCols * 2 % 512 == 0 && kStageBytes % 1024 == 0 && kBlockM * 4 % 16 == 0);
};

}  // namespace dmattn::sm90
