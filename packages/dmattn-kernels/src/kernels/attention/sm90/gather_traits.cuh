// Shapes, layouts and the shared memory of the Hopper forward kernel over lists of keys.
#pragma once

#include "fwd_traits.cuh"
#include "gather_params.h"

namespace dmattn::sm90 {

// K and V are written to shared memory by ordinary threads (the generic proxy) and read by matrix instructions (the
// async proxy). Who puts the fence between them.
enum class ProxyFence {
  kNone,      // nobody: what is common practice, though PTX promises nothing
  kConsumer,  // every thread that starts a product, after it has waited for the copies
  kProducer,  // every thread that copies, once its copies are there, before it says so
};

template <class Element, int kHeadDim, bool kBias_, int kBlockN, int kStages, ProxyFence kFence_, bool kShortTail_,
          int kProducerRegisters_, int kBlocksPerSm = 1, bool kSplit = false>
struct GatherTraits : FwdTraits<Element, kHeadDim, 2, kBlockN, kStages, ScoreMode::kPlain, kBlocksPerSm, kSplit> {
  using Base = FwdTraits<Element, kHeadDim, 2, kBlockN, kStages, ScoreMode::kPlain, kBlocksPerSm, kSplit>;
  using Arguments = cute::conditional_t<kSplit, SplitFwdArguments<GatherArguments>, GatherArguments>;
  static_assert(!kSplit || Base::kOverlaps);
  static constexpr bool kBias = kBias_;  // a number is added to the logits of each key
  // It comes with the products: see key_bias.cuh. Each number is large or not by itself.
  static constexpr bool kBiasInProduct = kBias && !Base::kOverlaps;
  using BiasOperands = typename Base::BiasOperands;
  static constexpr ProxyFence kFence = kFence_;
  static_assert(!kBiasInProduct || kFence != ProxyFence::kProducer);  // which does not fence what is written beside K
  static constexpr bool kShortTail = kShortTail_;                     // the last tile of a list may have 32 or 64 keys
  // The three warpgroups share what the block was launched with, 168 registers a thread, or 80 where two blocks share
  // an SM: with more, setmaxnreg would wait forever.
  static constexpr int kProducerRegisters = kProducerRegisters_;
  static constexpr int kConsumerRegisters = (3 * (kBlocksPerSm == 2 ? 80 : 168) - kProducerRegisters) / 16 * 8;

  static constexpr int kChunks = 8;                    // 16 bytes each, of a row of a panel
  static constexpr int kPassKeys = 128 / kChunks;      // rows that the producer's threads copy at a time
  static constexpr int kPasses = kBlockN / kPassKeys;  // ... and how often, for a tile: rows of a thread
  static constexpr int kPanelBytes = kBlockN * 128;    // of K or V of a stage
  static constexpr int kTileBytes = Base::kTileK * sizeof(Element);
  static_assert(Base::kPanelCols == 64 && kBlockN % kPassKeys == 0 && kBlockN <= 128);

  // Keys of the last tile of a list that are computed, for so many that it has.
  static constexpr int kTail = 32, kLongTail = 64 < kBlockN ? 64 : kBlockN;
  static __device__ __forceinline__ int tile_width(int keys) {
    if constexpr (kShortTail) {
      if (keys <= kTail) return kTail;
      if (keys <= kLongTail) return kLongTail;
    }
    return kBlockN;
  }
  template <int kKeys>
  using TailMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<Int<Base::kBlockM>, Int<kKeys>, Int<kHeadDim>>>(),
      typename Base::Warpgroups{}));
  template <int kKeys>
  using TailBiasMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, Int<kKeys>, Int<BiasOperands::kCols>>>()));

  // Wide heads have room for one Q. Then each consumer gives its half back as soon as the last scores are there, and
  // writes the output from registers. Otherwise the output leaves through the stage of its own Q.
  static constexpr bool kOneQ = kHeadDim > 128;
  static constexpr int kQStages = kOneQ ? 1 : 2;
  static constexpr int kQBarriers = 2;                       // of a stage, or of a consumer's half
  static constexpr int kQRows = kOneQ ? 64 : Base::kBlockM;  // that TMA copies at once
  // Facts take little room. With fewer stages than K has, they would decide how far the producer can go ahead.
  static constexpr int kFactStages = 4;
  static_assert(kFactStages >= kStages);
  using LayoutQs = decltype(cute::tile_to_shape(typename Base::template Atom<cute::GMMA::Major::K>{},
                                                cute::Shape<Int<Base::kBlockM>, Int<kHeadDim>, Int<kQStages>>{}));
  // An item as the producer announces it.
  struct alignas(16) Announced {
    int32_t index;  // items and more: there is none
    int32_t count;  // entries of the list that any row sees
    int32_t full;   // ... of them the first that all rows see
    FwdItem item;
  };
  struct Shared {
    alignas(1024) Element q[kQStages * Base::kTileQ];  // and the output on its way out
    alignas(1024) Element k[kStages * Base::kTileK];
    alignas(1024) Element v[kStages * Base::kTileK];
    cute::conditional_t<kBiasInProduct, BiasOperands, NoOperands> bias_operands;
    // Of the keys of a tile: the positions that see it (a KeyInterval), and what is added to its logits. With a bias in
    // the product that is what the operands lack, and the stages are those of K.
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
