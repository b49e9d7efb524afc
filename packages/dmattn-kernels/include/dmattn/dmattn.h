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
 * and may be captured in a CUDA graph. Errors come back as a status; dmattn_last_error() has the words.
 *
 * Each thread remembers the last parameters of each operation that it has checked, with what they lead to. Asking for
 * the size of the workspace and then launching with the same bytes therefore checks and plans only once.
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

/* Rises when a struct or a meaning below changes incompatibly. It does not rise when a params struct grows at its
 * end. */
#define DMATTN_ABI_VERSION 1

typedef enum dmattn_status {
  DMATTN_OK = 0,
  DMATTN_ERROR_INVALID_VALUE = 1, /* a shape, stride, pointer or number is wrong */
  DMATTN_ERROR_INVALID_DTYPE = 2, /* an element type is wrong */
  DMATTN_ERROR_UNSUPPORTED = 3,   /* right in itself, but no kernel for it (an old GPU, a head_dim above 256) */
  DMATTN_ERROR_NO_DEVICE = 4,     /* no NVIDIA driver, no GPU, or no such device number */
  DMATTN_ERROR_CUDA = 5           /* the CUDA runtime reported an error */
} dmattn_status;

typedef enum dmattn_dtype {
  DMATTN_FLOAT16 = 1,
  DMATTN_BFLOAT16 = 2,
  DMATTN_FLOAT32 = 3,
  DMATTN_BOOL = 4, /* one byte, 0 = false, anything else = true */
  DMATTN_INT32 = 5,
  DMATTN_INT64 = 6
} dmattn_dtype;

/* A strided view of device memory. data == NULL means that the tensor is absent, or that it has no elements. */
typedef struct dmattn_tensor {
  void* data;
  int32_t dtype;     /* dmattn_dtype */
  int32_t ndim;      /* 0 = absent; otherwise 1 to 4, as the field that holds it says */
  int64_t shape[4];  /* in elements; entries at and past ndim are ignored */
  int64_t stride[4]; /* in elements; 0 along a dimension repeats its elements and is read in place */
} dmattn_tensor;

/* The keys that a selection keeps. Causal (running top-w and other key intervals): query row i stands at position
 * r = i + seqlen_k - seqlen_q and keeps the keys j with j <= r < end[j]; a list for each block of 128 query rows holds
 * the keys that any of its rows keeps, those that all of them keep first. Not causal: one list of the kept keys.
 * Written by dmattn_select_keys or dmattn_build_key_lists, read by dmattn_fwd and dmattn_bwd; it may serve many calls
 * with equal lengths. */
typedef struct dmattn_key_selection {
  dmattn_tensor end;   /* int32 [batch|1, heads, seqlen_k], contiguous; heads = nheads, nheads_k or 1 */
  dmattn_tensor idx;   /* int32 [batch|1, heads, blocks, capacity], contiguous */
  dmattn_tensor count; /* int32 [batch|1, heads, blocks], contiguous: entries of each list */
  dmattn_tensor full;  /* int32, as count: leading entries that every row of the block keeps; absent when not causal */
} dmattn_key_selection;

typedef struct dmattn_fwd_params {
  size_t struct_size; /* sizeof(dmattn_fwd_params) as the caller was compiled */
  int32_t device;     /* CUDA device number that owns every pointer below and the stream */
  int32_t is_causal;  /* 0 or 1; aligned to the bottom right corner */
  float softmax_scale;
  float softcap;                  /* <= 0: none */
  dmattn_tensor q;                /* [batch, seqlen_q, nheads, head_dim], f16 or bf16, unit last stride */
  dmattn_tensor k;                /* [batch, seqlen_k, nheads_k, head_dim], dtype of q, unit last stride */
  dmattn_tensor v;                /* as k */
  dmattn_tensor mask;             /* optional bool [batch|1, nheads|nheads_k|1, seqlen_q|1, seqlen_k|1], any strides */
  dmattn_tensor bias;             /* optional dtype of q or f32, shapes as mask, any strides */
  dmattn_tensor out;              /* [batch, seqlen_q, nheads, head_dim], dtype of q, unit last stride */
  dmattn_tensor softmax_lse;      /* [batch, nheads, seqlen_q] f32, unit last stride */
  int32_t num_splits;             /* parts into which the keys of a row block are split; 0 = chosen by the library */
  int32_t reserved;               /* 0 */
  dmattn_key_selection selection; /* optional (idx.ndim == 0: none); excludes mask. Its kind (causal or not) must be
                                     is_causal's. */
  dmattn_tensor softmax_lse_rest; /* optional output, as softmax_lse: the part of the log-sum-exp that its rounding to
                                     f32 dropped. Gives dmattn_bwd exact probabilities where logits are huge (a row
                                     whose every bias is the lowest finite number). */
  /* Packed sequences, instead of a batch of equal lengths (cu_seqlens_q.ndim == 0: none). Sequence b has the query rows
   * cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 and the keys cu_seqlens_k[b] to cu_seqlens_k[b + 1] - 1; causality is
   * aligned to the bottom right corner of each. Both arrays rise from 0 to total_q and total_k. They are read on the
   * device only, so that neither they nor the bounds below can be checked: rows that they do not cover are not written.
   * Then:
   *   q, out        [total_q, nheads, head_dim]            k, v   [total_k, nheads_k, head_dim]
   *   softmax_lse, softmax_lse_rest   [nheads, total_q]
   *   mask, bias    [nheads|nheads_k|1, total_k], the same for all rows of a sequence, or
   *                 [nheads|nheads_k|1, total_q, max_seqlen_k], columns counted from the first key of the row's own
   *                 sequence
   * num_splits must be 0 or 1, and selection absent. */
  dmattn_tensor cu_seqlens_q, cu_seqlens_k; /* int32 [sequences + 1], contiguous */
  int32_t max_seqlen_q, max_seqlen_k;       /* bounds of the lengths of the sequences */
  /* What is known of a causal selection: > 0: the row at position r keeps the keys r - window < j <= r and no others.
   * Kernels that find a window by themselves then leave the lists unread; the others read them, so that both have to
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
  /* Each optional; shape and dtype of q, k, v; unit last stride. Until dq is written, sums of dk and dv may lie in its
   * memory. So gradients, dbias included, overlap neither one another nor what the call reads. */
  dmattn_tensor dq, dk, dv;
  /* Optional; shape and dtype of bias; contiguous, but that rows of four dimensions may be any number of entries apart:
   * what lies between them is lost. On Hopper rows that start on 16 bytes are written at full speed. */
  dmattn_tensor dbias;
  int32_t deterministic;          /* 1: bitwise repeatable */
  int32_t reserved;               /* 0 */
  dmattn_key_selection selection; /* as given to dmattn_fwd */
  dmattn_tensor softmax_lse_rest; /* optional, as dmattn_fwd wrote it */
  /* As given to dmattn_fwd, with its shapes. Where dbias has an entry for every row, those beyond the keys of the row's
   * sequence become 0. */
  dmattn_tensor cu_seqlens_q, cu_seqlens_k;
  int32_t max_seqlen_q, max_seqlen_k;
  int32_t window;       /* as given to dmattn_fwd */
  int32_t reserved_end; /* 0 */
  /* Optional, a cudaEvent_t of the device. It is recorded on the stream as soon as dk, dv and dbias are written, which
   * may be before dq is: what needs only these can go on beside the rest. */
  void* keys_written;
} dmattn_bwd_params;

/* Selection of keys by score. Order: higher score first, among equal scores the later key first; a key whose score is
 * NaN or -inf, or that key_mask forbids, is never selected.
 *   causal      row at position r keeps the `window` best keys among 0..r (all of them while there are fewer)
 *   not causal  every row keeps the `window` best of all keys */
typedef struct dmattn_select_params {
  size_t struct_size;
  int32_t device;
  int32_t is_causal;
  int32_t window;                 /* w >= 1 */
  int32_t reserved;               /* 0 */
  int64_t seqlen_q;               /* query rows, aligned to the end of the keys; <= seqlen_k when causal */
  dmattn_tensor scores;           /* f16, bf16 or f32 [batch|1, heads|1, seqlen_k], any strides */
  dmattn_tensor key_mask;         /* optional bool [batch|1, heads|1, seqlen_k], any strides */
  dmattn_key_selection selection; /* outputs; capacity from dmattn_select_capacity, blocks = ceil(seqlen_q / 128), or 1
                                     when not causal; heads and batch the broadcast of scores' and key_mask's */
  dmattn_tensor cu_seqlens;       /* optional int32 [documents + 1], contiguous, rising from 0 to seqlen_k: documents
                                     packed one behind the other, the same in every batch and head. Keys compete
                                     within their document, and only its rows see them. Causal, seqlen_q ==
                                     seqlen_k. Keys behind the last boundary count as one more document. */
} dmattn_select_params;

/* Key lists from intervals of one's own: sliding windows, packed documents, any causal selection whose `end` is known.
 * Reads selection.end, writes selection.idx, count and full, both parts of a list ascending. A list that does not fit
 * the capacity, which may be 0, is left empty (count = full = 0: its rows keep nothing); `needed` tells. */
typedef struct dmattn_build_key_lists_params {
  size_t struct_size;
  int32_t device;
  int32_t reserved;               /* 0 */
  int64_t seqlen_q;               /* query rows, aligned to the end of the keys; <= seqlen_k */
  int64_t reach;                  /* the largest end[j] - j: keys further than that before the first row of a block are
                                     not looked for, which saves time. 0 = unknown */
  dmattn_key_selection selection; /* end is read, the others are written; blocks = ceil(seqlen_q / 128). Lists of at
                                     most reach + 127 entries come of intervals within `reach`. */
  dmattn_tensor needed;           /* optional output, as selection.count: entries of each list, fitting or not */
} dmattn_build_key_lists_params;

/* Puts new tokens, one after the other, into a cache of keys. Empty entries have score -inf and position -1.
 *   evict      the entry of the lowest score makes room when the token's score is not lower (so that among equal scores
 *              the later key stays): the cache holds the `capacity` best keys. A token of score NaN or -inf is never
 *              kept.
 *   not evict  a token goes to the entry of its position; where there is none it is skipped.
 *   with q     each token's queries attend to what the cache holds after it, with the scores as bias. */
typedef struct dmattn_cache_append_params {
  size_t struct_size;
  int32_t device;
  int32_t evict;                  /* 0 or 1 */
  float softmax_scale;            /* read when q is present, as softcap */
  float softcap;                  /* <= 0: none */
  dmattn_tensor k_new, v_new;     /* [batch, tokens, nheads_k, head_dim], f16 or bf16, unit last stride */
  dmattn_tensor score_new;        /* [batch, nheads_k, tokens], dtype of score */
  dmattn_tensor active;           /* optional bool [batch, tokens]; false skips the token (ragged batches) */
  dmattn_tensor k_cache, v_cache; /* [batch, capacity, nheads_k, head_dim], dtype of k_new, unit last stride */
  dmattn_tensor score;            /* [batch, nheads_k, capacity], f32 or the dtype of k_cache, contiguous */
  dmattn_tensor position;         /* int32 [batch, nheads_k, capacity], contiguous */
  dmattn_tensor seen;             /* int32 [batch], contiguous: tokens so far, raised by those that are put in */
  dmattn_tensor q;                /* optional [batch, tokens, nheads, head_dim], dtype of k_cache; needs evict */
  dmattn_tensor out;              /* as q; present when q is. A skipped token's is finite and means nothing */
} dmattn_cache_append_params;

/* A draft of up to 32 tokens: their queries attend to what a cache of the best keys would hold after each of them, if
 * dmattn_cache_append with `evict` put them in one after the other; but they are not put in. Their keys and values are
 * written to the rows of k_cache and v_cache behind the entries, as a part of the draft. */
typedef struct dmattn_cache_draft_params {
  size_t struct_size;
  int32_t device;
  int32_t reserved; /* 0 */
  float softmax_scale;
  float softcap;                  /* <= 0: none */
  dmattn_tensor q;                /* [batch, tokens, nheads, head_dim], f16 or bf16, unit last stride */
  dmattn_tensor k_new, v_new;     /* [batch, tokens, nheads_k, head_dim], dtype of q, unit last stride */
  dmattn_tensor score_new;        /* [batch, nheads_k, tokens], dtype of score */
  dmattn_tensor k_cache, v_cache; /* [batch, rows, nheads_k, head_dim], dtype of q, unit last stride: the entries, and
                                     behind them at least `tokens` rows that are overwritten */
  dmattn_tensor score;            /* [batch, nheads_k, capacity], f32 or the dtype of q, contiguous */
  dmattn_tensor position;         /* int32 [batch, nheads_k, capacity], contiguous */
  dmattn_tensor seen;             /* int32 [batch], contiguous */
  dmattn_tensor draft; /* output, int32 [batch, nheads_k, tokens, 4], contiguous, on 16 bytes: what becomes of
                                     each token, for dmattn_cache_commit */
  dmattn_tensor out;   /* as q */
} dmattn_cache_draft_params;

/* Puts the first tokens of a draft in, with the results of dmattn_cache_append. The cache, rows behind the entries
 * included, has to be as dmattn_cache_draft left it. */
typedef struct dmattn_cache_commit_params {
  size_t struct_size;
  int32_t device;
  int32_t reserved;               /* 0 */
  dmattn_tensor draft;            /* as dmattn_cache_draft wrote it */
  dmattn_tensor count;            /* int32 or int64 [batch]: how many of each sequence; other numbers count
                                                    as 0 or as all tokens */
  dmattn_tensor k_cache, v_cache; /* as given to dmattn_cache_draft, as the next three */
  dmattn_tensor score, position, seen;
} dmattn_cache_commit_params;

/* Puts the keys of two stretches behind one another, so that attention finds them in one tensor: `first`, which are a
 * state's or a cache's, and `new`. What the results have room for beyond both comes before them and holds no key:
 * zeros, with a score of -inf. The results overlap with no other tensor. */
typedef struct dmattn_join_keys_params {
  size_t struct_size;
  int32_t device;
  int32_t reserved; /* 0 */
  dmattn_tensor k_first,
      v_first;                /* [batch, seqlen_first, heads_k, head_dim or head_dim_v], dtype of k, unit last stride;
                                     here and below heads_k, heads_s and heads_m divide heads: each such head goes to
                                     as many neighbouring heads of the results */
  dmattn_tensor score_first;  /* [batch|1, heads_s, seqlen_first], any strides; dtype of score, or 16-bit where that
                                     is f32 */
  dmattn_tensor k_new, v_new; /* [batch, seqlen_new, heads_k, head_dim or head_dim_v], as k_first */
  dmattn_tensor score_new;    /* [batch|1, heads_s, seqlen_new], as score_first */
  dmattn_tensor mask_new;     /* optional bool [batch|1, heads_m, seqlen_new], any strides; false: a score of -inf */
  dmattn_tensor k, v;         /* [batch, seqlen, heads, head_dim or head_dim_v], f16, bf16 or f32, unit last stride;
                                     seqlen >= seqlen_first + seqlen_new */
  dmattn_tensor score;        /* f16, bf16 or f32 [batch, heads, seqlen], any strides */
  dmattn_tensor place_first;  /* optional int32 [batch, heads, seqlen_first], contiguous: where each of the first keys
                                     lies in k_first, v_first and score_first; absent: in this order */
} dmattn_join_keys_params;

/* The keys that a row of a selection keeps, in order of position: what the rows behind a stretch may still see of it
 * and of all before it. The last ones, where a row keeps more than there are entries; where it keeps fewer, the first
 * entries hold no key: zeros, a score of -inf and position -1. The results overlap with no other tensor. */
typedef struct dmattn_keep_keys_params {
  size_t struct_size;
  int32_t device;
  int32_t starts_early;         /* 1: these kernels may run beside those of the call of this library that is enqueued
                                         right before, where that lets them (a forward over key lists does on Hopper):
                                         neither call writes what the other one reads or writes. 0: after them */
  int64_t row;                  /* position of the row, at or behind every key: it keeps the keys whose end is behind
                                         it. seqlen - 1 for the last row */
  dmattn_tensor end;            /* int32 [batch|1, heads_s, seqlen], unit last stride, of a selection; a causal one or
                                         not. Here and below heads_s and heads_k divide heads, as in
                                         dmattn_join_keys_params */
  dmattn_tensor place;          /* optional int32 [batch, heads, seqlen], contiguous: where the keys that `end`
                                         speaks of lie in k, v, score and position; absent: in this order */
  dmattn_tensor k, v;           /* [batch, seqlen, heads_k, head_dim or head_dim_v], dtype of k_kept, unit last
                                         stride */
  dmattn_tensor score;          /* [batch|1, heads_s, seqlen], any strides; dtype of score_kept, or 16-bit where that
                                         is f32 */
  dmattn_tensor position;       /* optional int32 [batch|1, heads_s, held], any strides, held <= seqlen: positions of
                                         the first `held` keys as they lie; absent: held = 0. Those behind them count on
                                         from `seen` */
  dmattn_tensor seen;           /* optional int32 [batch], contiguous; absent: 0 */
  dmattn_tensor k_kept, v_kept; /* outputs [batch, window, heads, head_dim or head_dim_v], f16, bf16 or f32, unit
                                         last stride */
  dmattn_tensor score_kept;     /* output, f16, bf16 or f32 [batch, heads, window], any strides */
  dmattn_tensor position_kept;  /* output, int32 [batch, heads, window], contiguous */
  dmattn_tensor seen_kept;      /* optional output, int32 [batch], contiguous: seen + seqlen - held */
} dmattn_keep_keys_params;

/* Bytes of device scratch that the call with these params needs. Data pointers need not be set yet, but which tensors
 * are present (ndim > 0) must be final. The size then holds for tensors that start on 16 bytes: others may need more,
 * and a launch refuses a workspace that is too small. */
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
