// Shapes, layouts and the shared memory of the Hopper forward kernel.
#pragma once

#include <cutlass/numeric_types.h>

#include <cutlass/gemm/collective/builders/sm90_common.inl>

#include "../../tiles.h"
#include "bias_classes.cuh"
#include "bias_rows.cuh"
#include "fwd_params.h"
#include "key_bias.cuh"
#include "pipeline.cuh"

namespace dmattn::sm90 {

// What is done to the scores, apart from lengths and causality.
enum class ScoreMode {
  kPlain,          // nothing
  kMask,           // a dense mask
  kTileBias,       // a bias for each row and key, and a mask if there is one
  kKeyBias,        // a bias for each key and nothing else: the products add it (fwd_key_bias.cuh)
  kMaskedKeyBias,  // a bias for each key, and a mask or a window if there is one
  kAny,            // a mask and any bias, without a window; also beside softcap or with a scale that is not positive
  kWindow,         // nothing, but rows see a window of keys
  kPacked,         // nothing, over packed sequences
  kUnalignedBias,  // as kTileBias, with a 16-bit bias whose rows start on any two bytes (bias_classes.h)
  kSoftcap,        // softcap, and a window if there is one
  kPackedSoftcap,  // softcap, over packed sequences
};
// Modes that have kernels whose items have a share of the keys each. These serve no windows, and modes for windows or
// packed sequences have none of them; for a bias for each key they are those of kMaskedKeyBias.
constexpr bool may_split_keys(ScoreMode mode) {
  return mode != ScoreMode::kWindow && mode != ScoreMode::kKeyBias && mode != ScoreMode::kPacked &&
         mode != ScoreMode::kPackedSoftcap;
}
// Whether the rows of a call see a window of keys: never, if FwdArguments::window says so, or always.
enum class Windows { kNever, kMaybe, kAlways };

// The layout of a bias for each key in a stage of shared memory: the fp32 numbers of a tile, in the order in which
// the threads of a quad read them. Those of thread c, keys 8 i + 2 c and 8 i + 2 c + 1 of each fragment i, are
// contiguous. Four words of padding between two threads' numbers keep these on different banks.
template <int kBlockN>
struct KeyBiasLayout {
  static constexpr int kThreadWords = kBlockN / 4 + 4;
  static constexpr int kBytes = 4 * kThreadWords * 4;
  static __device__ __forceinline__ int word(int key) { return key % 8 / 2 * kThreadWords + key / 8 * 2 + key % 2; }
  // The offset in bytes of the numbers of a thread.
  static __device__ __forceinline__ uint32_t thread_offset(int lane) { return lane % 4 * kThreadWords * 4; }
};

// Shared memory that only the general modes have (kGeneral). Bias tiles lie in panels of 128 bytes a row, as TMA
// writes them: 64 keys of 16 bits, or 32 of fp32. A stage has room for a 16-bit tile, or half of one in fp32.
struct NoGeneral {};
struct NoRequests {};
template <int kBlockM, int kBlockN, int kStages, bool kHasTiles>
struct GeneralShared {
  static constexpr int kStageBytes = kHasTiles ? kBlockM * kBlockN * 2 : KeyBiasLayout<kBlockN>::kBytes;

  alignas(1024) char bias[2][kStageBytes];
  Barrier bias_full[2], bias_empty[2];
  cute::conditional_t<kHasTiles, BiasRequests<2>, NoRequests> bias_requests;
  int32_t tile[kStages];  // which keys are in a stage of K: see KeyTile
};

// The same for a bias that the products add: beside each stage of K the operands and, where these lack all of a large
// bias, its numbers.
template <int kBlockN, int kStages, class Operands>
struct KeyBiasShared : Operands {
  alignas(16) char large[kStages][KeyBiasLayout<kBlockN>::kBytes];
  float middle[kStages];  // what a tile's bias has in common, which the operands lack; NaN if they lack all of it
};

// In kernels whose producer announces items beside their numbers (kSaysItems), the items. To find the item of a
// number takes a search in packed sequences, and divisions in any case, which take a noticeable time where items have
// few keys.
template <class Item>
struct FoundShared {
  Item found[2];
};

template <class Element_, int kHeadDim_, int kConsumers_, int kBlockN_, int kStages_,
          ScoreMode kMode_ = ScoreMode::kPlain, int kBlocksPerSm_ = 1, bool kSplit_ = false>
struct FwdTraits {
  using Element = Element_;
  static constexpr ScoreMode kMode = kMode_;
  static constexpr bool kPacked = kMode == ScoreMode::kPacked || kMode == ScoreMode::kPackedSoftcap;
  static constexpr bool kSoftcap = kMode == ScoreMode::kSoftcap || kMode == ScoreMode::kPackedSoftcap;
  static constexpr bool kBiasInProduct = kMode == ScoreMode::kKeyBias;
  static constexpr bool kGeneral =
      kMode != ScoreMode::kPlain && kMode != ScoreMode::kWindow && !kPacked && !kSoftcap && !kBiasInProduct;
  // An item has a share of the keys that its rows see, and its results are partial ones.
  static constexpr bool kSplit = kSplit_;
  static_assert(!kSplit || may_split_keys(kMode));
  static constexpr bool kHasBoxedBias = kMode == ScoreMode::kUnalignedBias;
  static constexpr bool kHasTileBias = kMode == ScoreMode::kTileBias || kMode == ScoreMode::kAny || kHasBoxedBias;
  static constexpr bool kHasKeyBias = kBiasInProduct || kMode == ScoreMode::kMaskedKeyBias || kMode == ScoreMode::kAny;
  // Three consumers have neither a mask nor an fp32 bias: see sm90_general_fwd_is_tall().
  static constexpr bool kHasMask = kGeneral && kConsumers_ == 2, kHasWideBias = kConsumers_ == 2 && !kHasBoxedBias;
  // Row maxima are those of logits; otherwise of raw products. The softmax is given the same, except with
  // kBiasInProduct: there it is given raw products.
  static constexpr bool kLogits = kHasTileBias || kHasKeyBias;
  // kTileBias and kAny would spill more registers if they had windows.
  static constexpr Windows kWindows = kMode == ScoreMode::kWindow ? Windows::kAlways
                                      : kSplit                    ? Windows::kNever
                                      : kMode == ScoreMode::kSoftcap || kMode == ScoreMode::kMaskedKeyBias
                                          ? Windows::kMaybe
                                          : Windows::kNever;
  using GeneralArguments = cute::conditional_t<kHasBoxedBias, UnalignedBiasFwdArguments, GeneralFwdArguments>;
  using WholeArguments = cute::conditional_t<kPacked, PackedFwdArguments, FwdArguments>;
  using PlainArguments = cute::conditional_t<kSoftcap, SoftcapFwdArguments<WholeArguments>, WholeArguments>;
  using UnsplitArguments =
      cute::conditional_t<kGeneral, GeneralArguments,
                          cute::conditional_t<kBiasInProduct, KeyBiasFwdArguments, PlainArguments>>;
  using Arguments = cute::conditional_t<kSplit, SplitFwdArguments<UnsplitArguments>, UnsplitArguments>;
  using WholeItem = cute::conditional_t<kPacked, PackedFwdItem, FwdItem>;
  using Item = cute::conditional_t<kSplit, SplitFwdItem, WholeItem>;
  static constexpr int kHeadDim = kHeadDim_;
  // For how many of four scores the tanh is computed as a quotient (see softcap.cuh). Up to head_dim 128 this was the
  // fastest of 0 to 4; at 256 nothing else was measured.
  static constexpr int kCapQuotients = kHeadDim <= 128 ? 1 : 2;
  static constexpr int kConsumers = kConsumers_, kBlockM = 64 * kConsumers, kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;  // of K, and as many of V
  // Two thread blocks on an SM are two items in progress: while one waits for its first products or writes its
  // output, the other computes. Four warps then share a scheduler, so that the softmax of one runs beside the
  // products of the others, and nothing has to overlap within a consumer. That takes less than half as many registers
  // a thread.
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kOverlaps = kBlocksPerSm == 1;
  static constexpr bool kSaysItems = kPacked || !kOverlaps;
  // Two stages of Q: the next Q is copied while the scores of an item are computed, which matters where items have
  // few keys. At head_dim 96 this made long calls take up to 1.04 times as long.
  static constexpr bool kHasRoomForQ =
      kHeadDim == 128 && !kSplit && (kMode == ScoreMode::kPlain || kMode == ScoreMode::kPacked);
  // A consumer waits for the output of the tile before when it has a third of a thread's probabilities: see
  // stay_behind(). At these head dimensions long calls take 0.97 of the time with it, and with a bias in the product
  // 0.94 to 0.99 at all; elsewhere nothing is gained.
  static constexpr bool kHoldsOutput = kBiasInProduct || ((kHeadDim == 96 || kHeadDim == 128) &&
                                                          (kMode == ScoreMode::kPlain || kMode == ScoreMode::kPacked));
  static constexpr int kQStages = kBlocksPerSm == 2 || kHasRoomForQ ? 2 : 1;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Registers of a thread: what the producer gives up goes to the consumers. 128 * (kConsumers * kConsumerRegisters +
  // kProducerRegisters) fits the 65536 of an SM. Each of two blocks starts with 80 a thread, which is 128 * 240.
  static constexpr int kProducerRegisters = kBlocksPerSm == 2 ? 48 : kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kBlocksPerSm == 2 ? 96 : kConsumers == 2 ? 232 : 160;
  // TMA copies panels as wide as the swizzle of shared memory: 128 bytes, or 64 where head_dim is no multiple of 64.
  static constexpr int kPanelCols = kHeadDim % 64 == 0 ? 64 : 32;
  static constexpr int kPanels = kHeadDim / kPanelCols;

  template <cute::GMMA::Major kMajor>
  using Atom = cute::conditional_t<kMajor == cute::GMMA::Major::K,
                                   cute::conditional_t<kPanelCols == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                                       cute::GMMA::Layout_K_SW64_Atom<Element>>,
                                   cute::conditional_t<kPanelCols == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                                       cute::GMMA::Layout_MN_SW64_Atom<Element>>>;
  using LayoutQ =
      decltype(cute::tile_to_shape(Atom<cute::GMMA::Major::K>{}, cute::Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using LayoutQs = decltype(cute::tile_to_shape(Atom<cute::GMMA::Major::K>{},
                                                cute::Shape<Int<kBlockM>, Int<kHeadDim>, Int<kQStages>>{}));
  using LayoutK = decltype(cute::tile_to_shape(Atom<cute::GMMA::Major::K>{},
                                               cute::Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  // V as it lies in memory, seen as [head_dim][key].
  using LayoutVt = decltype(cute::tile_to_shape(Atom<cute::GMMA::Major::MN>{},
                                                cute::Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>{},
                                                cute::Step<cute::_2, cute::_1, cute::_3>{}));

  using Warpgroups = cute::Layout<cute::Shape<Int<kConsumers>, cute::_1, cute::_1>>;
  using ScoreMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<Int<kBlockM>, Int<kBlockN>, Int<kHeadDim>>>(),
      Warpgroups{}));
  using OutMma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<Int<kBlockM>, Int<kHeadDim>, Int<kBlockN>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>(),
      Warpgroups{}));
  // The product of the columns that a bias for each key adds to Q and K. All consumers have the same rows of Q in it.
  using BiasOperands = KeyBiasOperands<Element, kBlockN, kStages>;
  template <int kRows, int kTiles>
  using BiasLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW32_Atom<Element>{},
                                                  cute::Shape<Int<kRows>, Int<BiasOperands::kCols>, Int<kTiles>>{}));
  using BiasMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, Int<kBlockN>, Int<BiasOperands::kCols>>>()));
  // One instruction covers all keys of a tile: with several narrower ones the products take twice as long. CuTe has
  // instructions of every width only where CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED is defined: cmake/units.cmake names
  // the units that need it.
  static_assert(cute::size<1>(typename ScoreMma::AtomShape_MNK{}) == kBlockN);

  // Where there is room, the output has shared memory of its own, so that the next Q can be copied while it is
  // written.
  static constexpr bool kOwnOut = !kSplit && kHeadDim <= (kHasTileBias ? 64 : 128);
  // Q is free before the output is written: partial results go from registers straight to global memory.
  static constexpr bool kFreesQ = kOwnOut || kSplit;
  static constexpr int kTileQ = kBlockM * kHeadDim, kTileK = kBlockN * kHeadDim;

  struct Shared {
    alignas(1024) Element q[kQStages * kTileQ];
    alignas(1024) Element k[kStages * kTileK];
    alignas(1024) Element v[kStages * kTileK];
    alignas(1024) Element own_out[kOwnOut ? kTileQ : 8];
    Barrier q_full[kQStages], q_empty[kQStages];
    Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    Barrier item_full[2], item_empty[2];
    int32_t item[2];
    cute::conditional_t<
        kHasBoxedBias, BoxedBiasShared<kBlockM, kBlockN, kStages>,
        cute::conditional_t<kGeneral, GeneralShared<kBlockM, kBlockN, kStages, kHasTileBias>,
                            cute::conditional_t<kBiasInProduct, KeyBiasShared<kBlockN, kStages, BiasOperands>,
                                                cute::conditional_t<kSaysItems, FoundShared<Item>, NoGeneral>>>>
        general;

    __device__ __forceinline__ Element* out() { return kOwnOut ? own_out : q; }
  };
  // 1 KB is for aligning the tiles, as the base of shared memory need not be aligned.
  static constexpr uint32_t kSmemBytes = sizeof(Shared) + 1024;
  // An SM has 228 KB, of which each block takes 1 KB more than it asks for.
  static constexpr uint32_t kSmemLimit = (228 / kBlocksPerSm - 1) * 1024;
};

// Whether a kernel has the tile for which the plan counted thread blocks and laid out the workspace.
template <class T>
bool is_planned(const KernelChoice& choice) {
  const FwdTile& tile = choice.fwd_tile;
  return tile.block_m == T::kBlockM && tile.block_n == T::kBlockN && tile.blocks_per_sm == T::kBlocksPerSm;
}

}  // namespace dmattn::sm90
