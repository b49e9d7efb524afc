// Shapes, layouts and the shared memory of the Hopper forward kernel over lists of keys.
#pragma once

#include "fwd_traits.cuh"
#include "gather_params.h"

namespace dmattn::sm90 {

template <class Element, int kHeadDim, bool kBias_, int kBlockN, int kStages, int kProducerRegisters_,
          int kBlocksPerSm = 1, bool kSplit = false>
struct GatherTraits : FwdTraits<Element, kHeadDim, 2, kBlockN, kStages, ScoreMode::kPlain, kBlocksPerSm, kSplit> {
  using Base = FwdTraits<Element, kHeadDim, 2, kBlockN, kStages, ScoreMode::kPlain, kBlocksPerSm, kSplit>;
  using Arguments = cute::conditional_t<kSplit, SplitFwdArguments<GatherArguments>, GatherArguments>;
  static_assert(!kSplit || Base::kOverlaps);
  static constexpr bool kBias = kBias_;  // each key has a bias, which is added to its logits
  // The products add the bias, except where it is too large for that (key_bias.cuh), which is decided for each key.
  static constexpr bool kBiasInProduct = kBias && !Base::kOverlaps;
  struct BiasOperands : Base::BiasOperands {
    int32_t is_large[kStages];  // not 0 if `keys` of the stage lacks some of the bias, which is added to the scores
  };
  // The three warpgroups share the registers that the block was launched with: 168 a thread, or 80 where two blocks
  // share an SM. If they asked for more in sum, setmaxnreg would wait forever.
  static constexpr int kProducerRegisters = kProducerRegisters_;
  static constexpr int kConsumerRegisters = (3 * (kBlocksPerSm == 2 ? 80 : 168) - kProducerRegisters) / 16 * 8;

  // Where two thread blocks share an SM, the producer's warps are two teams, which copy every other tile each: fewer
  // warps execute those instructions of a tile that do not depend on the number of rows.
  static constexpr int kTeams = Base::kOverlaps ? 1 : 2;
  static constexpr int kTeamWarps = 4 / kTeams, kTeamThreads = 32 * kTeamWarps;
  static_assert(kStages % kTeams == 0);
  static constexpr int kChunks = 8;                         // pieces of 16 bytes in a row of a panel
  static constexpr int kPassKeys = kTeamThreads / kChunks;  // rows that the threads of a team copy in one pass
  static constexpr int kPasses = kBlockN / kPassKeys;  // passes for a tile: rows that each thread copies a piece of
  static constexpr int kPanelBytes = kBlockN * 128;    // bytes of a panel of K or V in one stage
  static constexpr int kTileBytes = Base::kTileK * sizeof(Element);
  static_assert(Base::kPanelCols == 64 && kBlockN % kPassKeys == 0 && kBlockN <= 128);

  // The last tile of a list may have 32 or 64 keys: it is computed with tile_width(keys) keys, where `keys` is how many
  // it has.
  static constexpr int kTail = 32, kLongTail = 64 < kBlockN ? 64 : kBlockN;
  static __device__ __forceinline__ int tile_width(int keys) {
    if (keys <= kTail) return kTail;
    return keys <= kLongTail ? kLongTail : kBlockN;
  }
  template <int kKeys>
  using TailMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<Int<Base::kBlockM>, Int<kKeys>, Int<kHeadDim>>>(),
      typename Base::Warpgroups{}));
  template <int kKeys>
  using TailBiasMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, Int<kKeys>, Int<BiasOperands::kCols>>>()));

  // Above head_dim 128 there is room for only one Q. Each consumer then releases its half of Q as soon as it has its
  // last scores, and writes the output from registers. Otherwise the output is stored through the stage of its item's
  // Q.
  static constexpr bool kOneQ = kHeadDim > 128;
  static constexpr int kQStages = kOneQ ? 1 : 2;
  static constexpr int kQBarriers = 2;                       // one for each stage, or for each consumer's half
  static constexpr int kQRows = kOneQ ? 64 : Base::kBlockM;  // rows that TMA copies at once
  // Intervals and biases of keys (facts) take little room. With fewer stages than K they would limit how far the
  // producer runs ahead.
  static constexpr int kFactStages = 4;
  static_assert(kFactStages >= kStages);
  using LayoutQs = decltype(cute::tile_to_shape(typename Base::template Atom<cute::GMMA::Major::K>{},
                                                cute::Shape<Int<Base::kBlockM>, Int<kHeadDim>, Int<kQStages>>{}));
  // What the producer tells the consumers about an item.
  struct alignas(16) Announced {
    int32_t index;  // p.items or more: there is no further item
    int32_t count;  // how many entries of the list any row sees
    int32_t full;   // how many of these, the first ones, all rows see
    typename Base::Item item;
  };
  struct Shared {
    alignas(1024) Element q[kQStages * Base::kTileQ];  // and the output on its way out
    alignas(1024) Element k[kStages * Base::kTileK];
    alignas(1024) Element v[kStages * Base::kTileK];
    cute::conditional_t<kBiasInProduct, BiasOperands, NoOperands> bias_operands;
    // For each key of a tile: the positions that see it (a KeyInterval), and its bias. With a bias in the product this
    // array has only the biases that are too large for the operands, and its stages are those of K.
    alignas(16) uint2 intervals[kFactStages][kBlockN];
    alignas(16) float bias[kFactStages][kBias ? kBlockN : 4];
    alignas(16) Announced item[2];
    Barrier q_full[kQBarriers], q_empty[kQBarriers];
    Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    Barrier facts_full[kFactStages], facts_empty[kFactStages];
    Barrier item_full[2], item_empty[2];
    int32_t next_item[2];
  };
  static constexpr uint32_t kSmemBytes = sizeof(Shared) + 1024;  // the base need not be aligned as the tiles must be
  static_assert(kSmemBytes <= Base::kSmemLimit);
};

}  // namespace dmattn::sm90
