/* dmattn: masked and biased attention on CUDA, as a plain C interface.
 *
 *   logits[b,h,i,j] = softcap(softmax_scale * q[b,i,h,:] . k[b,j,h/G,:]) + bias[b,h',i,j]
 *   keep[b,h,i,j]   = mask[b,h',i,j] and (not causal or j <= i + seqlen_k - seqlen_q)
 *   out[b,i,h,:]    = sum_j softmax_j(logits | keep) v[b,j,h/G,:]
 *   lse[b,h,i]      = log(sum_j exp(logits | keep)), natural logarithm
 *
 * with G = nheads / nheads_k and softcap(x) = c * tanh(x / c) for c > 0, else x. A row that keeps nothing
 * has out = 0, lse = -inf and contributes nothing to any gradient.
 *
 * Sequences of unequal lengths may be packed one behind the other (cu_seqlens_q, cu_seqlens_k below): every tensor then
 * lacks its batch dimension, and b, i and j above count within each sequence.
 *
 * Every call validates its arguments before anything is launched, enqueues its work on the caller's stream,
 * and neither synchronises nor allocates: all scratch memory is the `workspace` that the caller passes, of at
 * least the size that the matching `..._workspace_size` call reports. Calls are re-entrant from many threads
 * and may be captured in a CUDA graph. Errors come back as a status; dmattn_last_error() has the message.
 *
 * Each thread remembers, for each operation, the last parameters that were valid and the plan made for them. Asking
 * for the size of the workspace and then launching with the same bytes therefore checks and plans only once.
 *
 * Some values are read on the device only, so that no call can check them: cu_seqlens, the entries of key lists, the
 * ends of key intervals, the places of keys, the positions and counters of a cache. Each is clamped where it is read.
 * Wrong ones give wrong numbers, but no access outside the tensors of the call.
 */
#ifndef DMATTN_DMATTN_H_
#define DMATTN_DMATTN_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define DMATTN_API __attribute__((visibility("default")))
#else
#define DMATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Rises when a struct or a meaning below changes incompatibly, but not when a params struct grows at its end. */
#define DMATTN_ABI_VERSION 1

typedef enum dmattn_status {
  DMATTN_OK = 0,
  DMATTN_ERROR_INVALID_VALUE = 1, /* a shape, stride, pointer or number is wrong */
  DMATTN_ERROR_INVALID_DTYPE = 2, /* an element type is wrong */
  DMATTN_ERROR_UNSUPPORTED = 3,   /* valid, but there is no kernel for it (an old GPU, a head_dim above 256) */
  DMATTN_ERROR_NO_DEVICE = 4,     /* no NVIDIA driver, no GPU, or no such device number */
  DMATTN_ERROR_CUDA = 5           /* the CUDA runtime reported an error, or the host ran out of memory */
} dmattn_status;

typedef enum dmattn_dtype {
  DMATTN_FLOAT16 = 1,
  DMATTN_BFLOAT16 = 2,
  DMATTN_FLOAT32 = 3,
  DMATTN_BOOL = 4, /* one byte, 0 = false, anything else = true */
  DMATTN_INT32 = 5,
  DMATTN_INT64 = 6
} dmattn_dtype;

/* A strided view of device memory. If it is absent (ndim == 0) or has no elements, data may be NULL. */
typedef struct dmattn_tensor {
  void* data;
  int32_t dtype;     /* dmattn_dtype */
  int32_t ndim;      /* number of dimensions: 0 = absent; otherwise as the comment of the field says, 1 to 4 */
  int64_t shape[4];  /* extents; entries from ndim on are ignored */
  int64_t stride[4]; /* in elements; a stride of 0 repeats the elements of its dimension, which are not copied */
} dmattn_tensor;

/* The keys that a selection keeps.
 *   causal      (running top-w and other intervals) query row i has the position r = i + seqlen_k - seqlen_q and keeps
 *               the keys j with j <= r < end[j]. There is a list for each block of 128 query rows: the keys that any of
 *               its rows keeps, beginning with those that all of them keep.
 *   not causal  one list of the kept keys.
 * Written by dmattn_select_keys or dmattn_build_key_lists, read by dmattn_fwd and dmattn_bwd. One selection may serve
 * many calls with the same lengths. */
typedef struct dmattn_key_selection {
  dmattn_tensor end;   /* int32 [batch|1, heads, seqlen_k], contiguous; heads = nheads, nheads_k or 1 */
  dmattn_tensor idx;   /* int32 [batch|1, heads, blocks, capacity], contiguous */
  dmattn_tensor count; /* int32 [batch|1, heads, blocks], contiguous: number of entries of each list */
  dmattn_tensor full;  /* int32, as count: leading entries that every row of the block keeps; absent when not causal */
} dmattn_key_selection;

typedef struct dmattn_fwd_params {
  size_t struct_size; /* sizeof(dmattn_fwd_params) when the caller was compiled */
  int32_t device;     /* CUDA device number that every pointer below and the stream belong to */
  int32_t is_causal;  /* 0 or 1; aligned to the bottom right corner */
  float softmax_scale;
  float softcap;             /* <= 0: none */
  dmattn_tensor q;           /* [batch, seqlen_q, nheads, head_dim], f16 or bf16, unit last stride */
  dmattn_tensor k;           /* [batch, seqlen_k, nheads_k, head_dim], dtype of q, unit last stride */
  dmattn_tensor v;           /* as k */
  dmattn_tensor mask;        /* optional bool [batch|1, nheads|nheads_k|1, seqlen_q|1, seqlen_k|1], any strides */
  dmattn_tensor bias;        /* optional dtype of q or f32, shapes as mask, any strides */
  dmattn_tensor out;         /* [batch, seqlen_q, nheads, head_dim], dtype of q, unit last stride */
  dmattn_tensor softmax_lse; /* [batch, nheads, seqlen_q] f32, unit last stride */
  int32_t num_splits;        /* parts into which the keys of a row block are split; 0 = chosen by the library */
  int32_t reserved;          /* 0 */
  /* Optional (idx.ndim == 0: none); excludes mask. Must be causal if is_causal is 1, and not causal if it is 0. */
  dmattn_key_selection selection;
  /* Optional output, as softmax_lse: what the log-sum-exp lost when it was rounded to f32. With it dmattn_bwd has
   * exact probabilities where logits are huge (such as a row whose biases are all the lowest finite number). */
  dmattn_tensor softmax_lse_rest;
  /* Packed sequences, instead of a batch of equal lengths (cu_seqlens_q.ndim == 0: none). Sequence b has the query rows
   * cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 and the keys cu_seqlens_k[b] to cu_seqlens_k[b + 1] - 1; causality is
   * aligned to the bottom right corner of each sequence. The arrays rise from 0 to total_q and total_k. They are read
   * on the device only, so that neither they nor max_seqlen_q and max_seqlen_k can be checked: rows that these do not
   * cover are not written. The shapes are then:
   *   q, out        [total_q, nheads, head_dim]            k, v   [total_k, nheads_k, head_dim]
   *   softmax_lse, softmax_lse_rest   [nheads, total_q]
   *   mask, bias    [nheads|nheads_k|1, total_k], the same for all rows of a sequence, or
   *                 [nheads|nheads_k|1, total_q, max_seqlen_k], columns counted from the first key of the row's own
   *                 sequence
   * num_splits must be 0 or 1, and selection absent. */
  dmattn_tensor cu_seqlens_q, cu_seqlens_k; /* int32 [sequences + 1], contiguous */
  int32_t max_seqlen_q, max_seqlen_k;       /* upper bounds on the lengths of the sequences */
  /* What is known of a causal selection. > 0: the row at position r keeps the keys r - window < j <= r and no
   * others. Kernels that find these keys by themselves do not read the lists; other kernels do, so that both must
   * say the same. 0: nothing is known, or there is no selection. */
  int32_t window;
  int32_t reserved_end; /* 0 */
} dmattn_fwd_params;

typedef struct dmattn_bwd_params {
  size_t struct_size;
  int32_t device;
  int32_t is_causal;
  float softmax_scale;
  float softcap;
  dmattn_tensor q, k, v, mask, bias; /* as given to dmattn_fwd */
  dmattn_tensor out, softmax_lse;    /* as dmattn_fwd wrote them */
  dmattn_tensor dout;                /* shape of out, dtype of q, unit last stride */
  dmattn_tensor dsoftmax_lse;        /* optional, shape of softmax_lse, f32 */
  /* Each optional; shape and dtype of q, k, v; unit last stride. Until dq is written, its memory may hold sums of
   * dk and dv. So the gradients, dbias included, must overlap neither one another nor anything that the call
   * reads. */
  dmattn_tensor dq, dk, dv;
  /* Optional; shape and dtype of bias; contiguous. With four dimensions and several rows and keys, rows may also
   * be further apart than they are long; what lies between them is overwritten. On Hopper, only rows that start on
   * 16 bytes are written at full speed. */
  dmattn_tensor dbias;
  int32_t deterministic;          /* 1: bitwise repeatable */
  int32_t reserved;               /* 0 */
  dmattn_key_selection selection; /* as given to dmattn_fwd */
  dmattn_tensor softmax_lse_rest; /* optional, as dmattn_fwd wrote it */
  /* As given to dmattn_fwd. Tensors have the shapes described there. If dbias has rows, their entries beyond the
   * keys of the row's sequence become 0. */
  dmattn_tensor cu_seqlens_q, cu_seqlens_k;
  int32_t max_seqlen_q, max_seqlen_k;
  int32_t window;       /* as given to dmattn_fwd */
  int32_t reserved_end; /* 0 */
  /* Optional, a cudaEvent_t of the device. It is recorded on the stream as soon as dk, dv and dbias are written,
   * possibly before dq is. Work on other streams that needs only these can then start earlier. */
  void* keys_written;
} dmattn_bwd_params;

/* Selection of keys by score. The order: higher score first; among equal scores, the later key first. A key whose score
 * is NaN or -inf, or that key_mask forbids, is never selected.
 *   causal      the row at position r keeps the `window` best keys among 0..r (all of them if there are fewer)
 *   not causal  every row keeps the `window` best of all keys */
typedef struct dmattn_select_params {
  size_t struct_size;
  int32_t device;
  int32_t is_causal;
  int32_t window;         /* w >= 1 */
  int32_t reserved;       /* 0 */
  int64_t seqlen_q;       /* query rows, aligned to the end of the keys; <= seqlen_k when causal */
  dmattn_tensor scores;   /* f16, bf16 or f32 [batch|1, heads|1, seqlen_k], any strides */
  dmattn_tensor key_mask; /* optional bool [batch|1, heads|1, seqlen_k], any strides */
  /* Outputs. The capacity is at least dmattn_select_capacity(), blocks is ceil(seqlen_q / 128), or 1 if not
   * causal, and batch and heads are those to which scores and key_mask broadcast. */
  dmattn_key_selection selection;
  /* Optional int32 [documents + 1], contiguous, rising from 0 to seqlen_k: documents packed one behind the other,
   * the same for all batches and heads. Keys compete within their document, and only its rows see them. Requires
   * is_causal and seqlen_q == seqlen_k. Keys behind the last boundary count as one more document. */
  dmattn_tensor cu_seqlens;
} dmattn_select_params;

/* Key lists from given intervals: sliding windows, packed documents, or any causal selection whose `end` is known.
 * Reads selection.end and writes selection.idx, count and full; both parts of a list are ascending. A list that
 * does not fit the capacity, which may be 0, is left empty (count = full = 0: its rows keep nothing). `needed`
 * says how long it is. */
typedef struct dmattn_build_key_lists_params {
  size_t struct_size;
  int32_t device;
  int32_t reserved; /* 0 */
  int64_t seqlen_q; /* query rows, aligned to the end of the keys; <= seqlen_k */
  /* The largest end[j] - j, or 0 if that is not known. Keys that lie further than this before the first row of a
   * block are not looked for, which saves time. */
  int64_t reach;
  /* end is read, the others are written; blocks = ceil(seqlen_q / 128). If no end[j] - j is above `reach`, no list
   * has more than reach + 127 entries. */
  dmattn_key_selection selection;
  dmattn_tensor needed; /* optional output, as selection.count: entries of each list, whether they fit or not */
} dmattn_build_key_lists_params;

/* Puts new tokens, one after the other, into a cache of keys. Empty entries have score -inf and position -1.
 *   evict      the token replaces the entry with the lowest score, unless its own score is lower. So the cache holds
 *              the `capacity` best keys, and among equal scores the later ones. A token whose score is NaN or -inf is
 *              never kept.
 *   not evict  a token is written to the entry whose number is its position; if there is none it is skipped.
 *   with q     the queries of each token attend to what the cache holds after that token, with the scores as bias. */
typedef struct dmattn_cache_append_params {
  size_t struct_size;
  int32_t device;
  int32_t evict;                  /* 0 or 1 */
  float softmax_scale;            /* read if q is present; so is softcap */
  float softcap;                  /* <= 0: none */
  dmattn_tensor k_new, v_new;     /* [batch, tokens, nheads_k, head_dim], f16 or bf16, unit last stride */
  dmattn_tensor score_new;        /* [batch, nheads_k, tokens], dtype of score */
  dmattn_tensor active;           /* optional bool [batch, tokens]; false skips the token (ragged batches) */
  dmattn_tensor k_cache, v_cache; /* [batch, capacity, nheads_k, head_dim], dtype of k_new, unit last stride */
  dmattn_tensor score;            /* [batch, nheads_k, capacity], f32 or the dtype of k_cache, contiguous */
  dmattn_tensor position;         /* int32 [batch, nheads_k, capacity], contiguous */
  dmattn_tensor seen;             /* int32 [batch], contiguous: tokens so far; raised by the tokens that are put in */
  dmattn_tensor q;                /* optional [batch, tokens, nheads, head_dim], dtype of k_cache; needs evict */
  dmattn_tensor out;              /* as q; present if q is. The rows of a skipped token are finite but meaningless */
} dmattn_cache_append_params;

/* A draft of up to 32 tokens. The queries of each token attend to what a cache of the best keys would hold after
 * it if dmattn_cache_append with `evict` put the tokens in one after the other. But the tokens are not put in:
 * their keys and values are written to the rows of k_cache and v_cache behind the entries, as a part of the draft. */
typedef struct dmattn_cache_draft_params {
  size_t struct_size;
  int32_t device;
  int32_t reserved; /* 0 */
  float softmax_scale;
  float softcap;              /* <= 0: none */
  dmattn_tensor q;            /* [batch, tokens, nheads, head_dim], f16 or bf16, unit last stride */
  dmattn_tensor k_new, v_new; /* [batch, tokens, nheads_k, head_dim], dtype of q, unit last stride */
  dmattn_tensor score_new;    /* [batch, nheads_k, tokens], dtype of score */
  /* [batch, rows, nheads_k, head_dim], dtype of q, unit last stride: the entries, and behind them at least
   * `tokens` rows that are overwritten. */
  dmattn_tensor k_cache, v_cache;
  dmattn_tensor score;    /* [batch, nheads_k, capacity], f32 or the dtype of q, contiguous */
  dmattn_tensor position; /* int32 [batch, nheads_k, capacity], contiguous */
  dmattn_tensor seen;     /* int32 [batch], contiguous */
  /* Output, int32 [batch, nheads_k, tokens, 4], contiguous, starts on 16 bytes: what would become of each token,
   * for dmattn_cache_commit. */
  dmattn_tensor draft;
  dmattn_tensor out; /* as q */
} dmattn_cache_draft_params;

/* Puts the first tokens of a draft into the cache. The result is the same as that of dmattn_cache_append. The
 * cache, including the rows behind the entries, must be as dmattn_cache_draft left it. */
typedef struct dmattn_cache_commit_params {
  size_t struct_size;
  int32_t device;
  int32_t reserved;    /* 0 */
  dmattn_tensor draft; /* as dmattn_cache_draft wrote it */
  /* int32 or int64 [batch]: how many tokens of each sequence to put in; clamped to 0 ... tokens. */
  dmattn_tensor count;
  dmattn_tensor k_cache, v_cache;      /* as given to dmattn_cache_draft */
  dmattn_tensor score, position, seen; /* as given to dmattn_cache_draft */
} dmattn_cache_commit_params;

/* Appends the keys `new` to the keys `first`, which are those of a state or of a cache, so that attention finds
 * both in one tensor. If the results have room for more keys, the additional entries come first and hold no key:
 * zeros, with a score of -inf. The results must not overlap with any other tensor. */
typedef struct dmattn_join_keys_params {
  size_t struct_size;
  int32_t device;
  int32_t reserved; /* 0 */
  /* [batch, seqlen_first, heads_k, head_dim or head_dim_v], dtype of k, unit last stride. Here and below heads_k,
   * heads_s and heads_m divide heads: each such head is copied to heads / heads_k (or heads_s, heads_m)
   * neighbouring heads of the results. */
  dmattn_tensor k_first, v_first;
  /* [batch|1, heads_s, seqlen_first], any strides; dtype of score, or 16-bit if score is f32. */
  dmattn_tensor score_first;
  dmattn_tensor k_new, v_new; /* [batch, seqlen_new, heads_k, head_dim or head_dim_v], as k_first */
  dmattn_tensor score_new;    /* [batch|1, heads_s, seqlen_new], as score_first */
  dmattn_tensor mask_new;     /* optional bool [batch|1, heads_m, seqlen_new], any strides; false: a score of -inf */
  /* [batch, seqlen, heads, head_dim or head_dim_v], f16, bf16 or f32, unit last stride; seqlen >= seqlen_first +
   * seqlen_new. */
  dmattn_tensor k, v;
  dmattn_tensor score; /* f16, bf16 or f32 [batch, heads, seqlen], any strides */
  /* Optional int32 [batch, heads, seqlen_first], contiguous: where each of the first keys lies in k_first, v_first
   * and score_first. Absent: in this order. */
  dmattn_tensor place_first;
} dmattn_join_keys_params;

/* Extracts the keys that one row of a selection keeps, in order of position. For a row behind a stretch these are
 * the keys, of the stretch and of all before it, that later rows may still see. If the row keeps more keys than
 * there are entries (window), the last ones are taken; if fewer, the first entries hold no key: zeros, a score of
 * -inf and position -1. The results must not overlap with any other tensor. */
typedef struct dmattn_keep_keys_params {
  size_t struct_size;
  int32_t device;
  /* 1: these kernels may run at the same time as those of the call of this library that is enqueued right before,
   * if that call allows it (on Hopper a forward over key lists does). Neither call may write what the other one
   * reads or writes. 0: they run after it. */
  int32_t starts_early;
  /* Position of the row, which is not before any key: it keeps the keys j with end[j] > row. seqlen - 1 for the
   * last row. */
  int64_t row;
  /* int32 [batch|1, heads_s, seqlen], unit last stride: `end` of a selection, causal or not. Here and below
   * heads_s and heads_k divide heads, as in dmattn_join_keys_params. */
  dmattn_tensor end;
  /* Optional int32 [batch, heads, seqlen], contiguous: where each key of `end` lies in k, v, score and position.
   * Absent: in this order. */
  dmattn_tensor place;
  dmattn_tensor k, v; /* [batch, seqlen, heads_k, head_dim or head_dim_v], dtype of k_kept, unit last stride */
  /* [batch|1, heads_s, seqlen], any strides; dtype of score_kept, or 16-bit if score_kept is f32. */
  dmattn_tensor score;
  /* Optional int32 [batch|1, heads_s, held], any strides, held <= seqlen: positions of the first `held` keys in
   * the order in which they lie in k. Absent: held = 0. The positions of the keys behind them are seen, seen + 1,
   * ... */
  dmattn_tensor position;
  dmattn_tensor seen; /* optional int32 [batch], contiguous; absent: 0 */
  /* Outputs [batch, window, heads, head_dim or head_dim_v], f16, bf16 or f32, unit last stride. */
  dmattn_tensor k_kept, v_kept;
  dmattn_tensor score_kept;    /* output, f16, bf16 or f32 [batch, heads, window], any strides */
  dmattn_tensor position_kept; /* output, int32 [batch, heads, window], contiguous */
  dmattn_tensor seen_kept;     /* optional output, int32 [batch], contiguous: seen + seqlen - held */
} dmattn_keep_keys_params;

/* Bytes of device scratch that the call with these params needs. Data pointers need not be set yet, but it must be
 * final which tensors are present (ndim > 0). In that case the size holds for tensors that start on 16 bytes.
 * Others may need more, and a launch refuses a workspace that is too small. */
DMATTN_API dmattn_status dmattn_fwd_workspace_size(const dmattn_fwd_params* params, size_t* bytes);
DMATTN_API dmattn_status dmattn_bwd_workspace_size(const dmattn_bwd_params* params, size_t* bytes);

DMATTN_API dmattn_status dmattn_select_workspace_size(const dmattn_select_params* params, size_t* bytes);
DMATTN_API dmattn_status dmattn_build_key_lists_workspace_size(const dmattn_build_key_lists_params* params,
                                                               size_t* bytes);
DMATTN_API dmattn_status dmattn_cache_append_workspace_size(const dmattn_cache_append_params* params, size_t* bytes);
DMATTN_API dmattn_status dmattn_cache_draft_workspace_size(const dmattn_cache_draft_params* params, size_t* bytes);
DMATTN_API dmattn_status dmattn_cache_commit_workspace_size(const dmattn_cache_commit_params* params, size_t* bytes);
DMATTN_API dmattn_status dmattn_join_keys_workspace_size(const dmattn_join_keys_params* params, size_t* bytes);
DMATTN_API dmattn_status dmattn_keep_keys_workspace_size(const dmattn_keep_keys_params* params, size_t* bytes);

/* Entries that each list of a selection needs room for. */
DMATTN_API int64_t dmattn_select_capacity(int64_t window, int64_t seqlen_k, int32_t is_causal);

/* workspace: device memory, 256-byte aligned, `bytes` long. stream: a cudaStream_t (NULL = default stream). */
DMATTN_API dmattn_status dmattn_fwd(const dmattn_fwd_params* params, void* workspace, size_t bytes, void* stream);
DMATTN_API dmattn_status dmattn_bwd(const dmattn_bwd_params* params, void* workspace, size_t bytes, void* stream);

DMATTN_API dmattn_status dmattn_select_keys(const dmattn_select_params* params, void* workspace, size_t bytes,
                                            void* stream);
DMATTN_API dmattn_status dmattn_build_key_lists(const dmattn_build_key_lists_params* params, void* workspace,
                                                size_t bytes, void* stream);
DMATTN_API dmattn_status dmattn_cache_append(const dmattn_cache_append_params* params, void* workspace, size_t bytes,
                                             void* stream);
DMATTN_API dmattn_status dmattn_cache_draft(const dmattn_cache_draft_params* params, void* workspace, size_t bytes,
                                            void* stream);
DMATTN_API dmattn_status dmattn_cache_commit(const dmattn_cache_commit_params* params, void* workspace, size_t bytes,
                                             void* stream);
DMATTN_API dmattn_status dmattn_join_keys(const dmattn_join_keys_params* params, void* workspace, size_t bytes,
                                          void* stream);
DMATTN_API dmattn_status dmattn_keep_keys(const dmattn_keep_keys_params* params, void* workspace, size_t bytes,
                                          void* stream);

/* The last error of the calling thread: which argument, what it got, what it wanted. Never NULL. */
DMATTN_API const char* dmattn_last_error(void);

DMATTN_API int32_t dmattn_abi_version(void);
DMATTN_API const char* dmattn_version(void);
/* Version of the CUDA toolkit that compiled the library, 1000 * major + 10 * minor. */
DMATTN_API int32_t dmattn_cuda_version(void);
/* Comma separated, e.g. "sm_80,sm_89,sm_90,compute_89": what the binary contains. */
DMATTN_API const char* dmattn_architectures(void);
/* Name of the set of kernels that serves this device, e.g. "sm80", or "sm89" for chips with less shared memory.
 * DMATTN_ARCH in the environment overrides the choice. */
DMATTN_API dmattn_status dmattn_device_architecture(int32_t device, const char** name);

#ifdef __cplusplus
}
#endif

#endif /* DMATTN_DMATTN_H_ */
