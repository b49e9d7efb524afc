// Shapes, layouts and the shared memory of the Hopper backward for wide heads.
#pragma once

#include "bwd_items.cuh"
#include "bwd_traits.cuh"

namespace dmattn::sm90 {

// Two thread blocks of a cluster share 128 keys. Each has 64 of them, and half of the columns of dq. The variants are
// kPlain, kPacked, kPackedSoftcap, kWindow, kSoftcap with or without a window, kMask, kDenseBias, kKeyBias,
// kMaskedKeyBias with or without a mask and a window, kLists, kBiasLists, kOrderedLists and kOrderedBiasLists.
template <class Element_, int kHeadDim_, BwdVariant kVariant = BwdVariant::kPlain>
struct BwdWideTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = 2;
  static constexpr int kTileDim = head_dim_tile(kHeadDim);  // columns in memory of dq, and of parts of dk and dv
  static constexpr BwdTile kTile = sm90_bwd_tile(kTileDim, false, false, false);
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;  // rows of queries; keys of both thread blocks
  static constexpr int kOwnKeys = 64;
  static_assert(kCluster == 2 && kBlockM == 64 && kBlockN == kCluster * kOwnKeys);
  static_assert(kTile.warps == 4 * kConsumers * kCluster && kTile.warps_m_dq == 4);
  static constexpr int kStagesQ = kTile.stages_q, kStagesdO = kHeadDim > 192 ? 1 : 2, kStagesdS = 2, kStagesP = 2;
  static_assert(kStagesQ == 2);
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // as in BwdTraits
  // Lists in a fixed order have kernels of their own. Over consecutive keys a kernel decides at run time whether dq is
  // added up in order.
  static constexpr bool kOrdered = kVariant == BwdVariant::kOrderedLists || kVariant == BwdVariant::kOrderedBiasLists;
  // For code that is shared with the kernels of other head dimensions.
  static constexpr bool kHasTurnWarps = false, kPairs = false;
  static constexpr bool kPacked = kVariant == BwdVariant::kPacked || kVariant == BwdVariant::kPackedSoftcap;
  static constexpr bool kMirrors = false, kFewKeys = false;
  static constexpr bool kListBias = kVariant == BwdVariant::kBiasLists || kVariant == BwdVariant::kOrderedBiasLists;
  static constexpr bool kKeyBias =
      kListBias || kVariant == BwdVariant::kKeyBias || kVariant == BwdVariant::kMaskedKeyBias;
  static constexpr bool kDenseBias = kVariant == BwdVariant::kDenseBias;
  static constexpr bool kBias = kKeyBias || kDenseBias;
  static constexpr bool kGathered = kListBias || kVariant == BwdVariant::kLists || kOrdered;
  static constexpr bool kSoftcap = kVariant == BwdVariant::kSoftcap || kVariant == BwdVariant::kPackedSoftcap;
  // The producer announces each step (RowTile): those that a mask leaves, if there is one.
  static constexpr bool kMasked = kVariant == BwdVariant::kMask || kVariant == BwdVariant::kMaskedKeyBias || kDenseBias;
  static constexpr bool kWindows = kMasked || kVariant == BwdVariant::kSoftcap || kVariant == BwdVariant::kWindow;
  static_assert(kGathered || kWindows || kPacked || kVariant == BwdVariant::kPlain || kVariant == BwdVariant::kKeyBias);
  // Warps of the first warpgroup beside the producer: one copies K of the block's own keys, one V, and one the part of
  // the other block's K that this block needs.
  static constexpr int kGatherWarps = kGathered ? 3 : 0;
  static constexpr int kMembers = 1;
  static constexpr int kPanelCols = 64, kPanels = kHeadDim / kPanelCols;
  // kOwnPanels: the panels of dq that a thread block computes, one a consumer, and those of Q and dO that it copies to
  // both blocks. With 192 columns the last of kAllPanels does not exist: its part of K is zeros.
  static constexpr int kAllPanels = kTileDim / kPanelCols, kOwnPanels = kAllPanels / kCluster;
  static_assert(kOwnPanels == kConsumers);

  static constexpr cute::GMMA::Major kK = cute::GMMA::Major::K, kMN = cute::GMMA::Major::MN;
  using AtomK = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using AtomMN = cute::GMMA::Layout_MN_SW128_Atom<Element>;
  // A tile of rows as TMA writes it; and kStages tiles, seen as [head_dim][row].
  using LayoutQ = decltype(cute::tile_to_shape(AtomK{}, cute::Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  template <int kRows, int kStages>
  using Columns = decltype(cute::tile_to_shape(AtomMN{}, cute::Shape<Int<kHeadDim>, Int<kRows>, Int<kStages>>{},
                                               cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using LayoutK = decltype(cute::tile_to_shape(AtomK{}, cute::Shape<Int<kOwnKeys>, Int<kHeadDim>>{}));
  using LayoutOut = LayoutK;
  // ds as [row][key], in panels of 64 keys; and a panel of K, seen as [column][key].
  using LayoutdS =
      decltype(cute::tile_to_shape(AtomK{}, cute::Shape<Int<kBlockM>, Int<kOwnKeys>, Int<kStagesdS * kCluster>>{}));
  using LayoutKt = decltype(cute::tile_to_shape(AtomMN{}, cute::Shape<Int<kPanelCols>, Int<kOwnKeys>>{},
                                                cute::Step<cute::_2, cute::_1>{}));

  // Products of one consumer. [key][row] = k q^T or v do^T.
  using ScoreMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<Int<kOwnKeys>, Int<kBlockM>, Int<kHeadDim>>>()));
  // [key][head_dim] += p^T do or ds^T q, the first operand from registers.
  using GradMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<Int<kOwnKeys>, Int<kHeadDim>, Int<kBlockM>>, kK,
                                 kMN>()));
  using OneGradMma = GradMma;
  // [row][column of a panel] = ds k.
  using DqMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<Int<kBlockM>, Int<kPanelCols>, Int<kOwnKeys>>, kK,
                                 kMN>()));
  static_assert(cute::size<1>(typename GradMma::AtomShape_MNK{}) == kHeadDim);
  // How the consumers of both thread blocks share a tile of dq.
  using Dq = DqTile<kBlockM, kTileDim, kConsumers * kCluster>;
  static_assert(Dq::kColsOfOne == kPanelCols);

  static constexpr int kTileQ = kBlockM * kHeadDim, kTileK = kOwnKeys * kHeadDim;
  static constexpr int kPanelK = kOwnKeys * kPanelCols, kPanelQ = kBlockM * kPanelCols;  // elements of a panel
  static constexpr int kWholeK = kAllPanels * kPanelK;
  static constexpr int kPaneldS = kBlockM * kOwnKeys;
  static constexpr int kMaskWords = kBlockN / 32;  // words of a row of bits that TMA brings into the L2 cache

  // What the list says about the block's keys. Rows count from the first one of the item: there are at most
  // kMostChunkRows. There is no room for the keys themselves, which are read from the list again when dk and dv leave.
  struct NoFacts {};
  struct KeyFacts {
    // The rows that see the key: the first one, plus 2^16 times their number. 0: no row sees it, or there is no key.
    alignas(16) uint32_t rows[kOwnKeys];
    alignas(16) float bias[kListBias ? kOwnKeys : 4];
    int2 seen_by_all;  // rows from x up to y see all keys
  };
  static_assert(kMostChunkRows < 1 << 15);
  // The rows of each stage of Q and of dO, as consumers wait for the one or the other first. exist: the mask leaves
  // any rows.
  struct AnnouncedRows {
    alignas(8) RowTile with_q[kStagesQ], with_dout[kStagesdO];
    bool exist;
  };

  struct Shared {
    alignas(1024) Element k[kWholeK];
    alignas(1024) Element v[kTileK];
    alignas(1024) Element other_k[kOwnPanels * kPanelK];  // of the other block's keys the columns of this block's dq
    alignas(1024) Element q[kStagesQ * kTileQ];           // at the end dk
    alignas(1024) Element dout[kStagesdO * kTileQ];       // at the end dv
    alignas(1024) Element ds[kStagesdS][kCluster][kPaneldS];  // of this block's keys, and of the other's
    // Probabilities, two fp16 a word, from a thread of the first consumer to the same one of the second.
    alignas(128) uint4 p[kStagesP][kBlockM / 16][128];
    alignas(128) float lse[kStagesQ][kBlockM];
    alignas(128) float delta[kStagesdO][kBlockM];
    alignas(128) float lse_rest[kStagesQ][kBias ? kBlockM : 4];
    std::conditional_t<kGathered, KeyFacts, NoFacts> facts;
    std::conditional_t<kPacked, PackedBwdItem, NoFacts> item;
    std::conditional_t<kMasked, AnnouncedRows, NoFacts> rows;
    Barrier k_full, v_full, facts_full, rows_known;
    Barrier q_full[kStagesQ], q_empty[kStagesQ], dout_full[kStagesdO], dout_empty[kStagesdO];
    Barrier p_full[kStagesP], ds_full[kStagesdS], ds_empty[kStagesdS];
    Barrier turn_full[kConsumers], turn_used[kConsumers];  // in a fixed order: a consumer may add to dq; it has
    int32_t number;                                        // in a fixed order: the number of the item
    bool takes_turns;                                      // packed sequences: whether dq is added up in order
  };
  static constexpr uint32_t kSmemBytes = sizeof(Shared) + 1024;  // 1024: to align the base for the tiles
  static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace dmattn::sm90
