// Checks on one tensor. On failure the message has the tensor's name, what was given and what was wanted.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "dmattn/dmattn.h"
#include "host/checks/validate.h"

namespace dmattn {

// "(2, 128, 4, 64)"
std::string text(const int64_t* values, int n);

// The tensor is present, has `ndim` dimensions, and its extents and size are small enough for kernels to count.
void check_rank(const char* name, const dmattn_tensor& t, int ndim);
void check_dtype(const char* name, const dmattn_tensor& t, std::initializer_list<int32_t> allowed);
// check_rank, and exactly this shape. `meaning`: for the message, where the shape comes from.
void check_shape(const char* name, const dmattn_tensor& t, std::initializer_list<int64_t> shape, const char* meaning);
void check_unit_last_stride(const char* name, const dmattn_tensor& t);
// No two indices are the same element, which two threads might otherwise write at the same time.
void check_writable(const char* name, const dmattn_tensor& t);
void check_contiguous(const char* name, const dmattn_tensor& t);
// Elements from one row (of the last dimension) to the next. The tensor has at least two dimensions.
int64_t row_pitch(const dmattn_tensor& t);
// Contiguous, except that rows may be further apart than they are long.
void check_rows_apart(const char* name, const dmattn_tensor& t);
// The data pointer is set, unless it need not be yet, and aligned to an element.
void check_pointer(const char* name, const dmattn_tensor& t, PointerCheck& pointers);

// Extents of a selection with lists for (batch, heads).
struct SelectionExtents {
  int64_t batch, heads, blocks, capacity, seqlen_k;
};

// Lists for each batch and head: one for each block of rows if the selection is causal, otherwise one.
int64_t selection_blocks(int64_t seqlen_q, bool is_causal);
void check_selection(const dmattn_key_selection& s, const SelectionExtents& e, bool is_causal, PointerCheck& pointers);

void check_head_dim(const char* name, int64_t head_dim);
void check_finite(const char* name, float value);
void check_flag(const char* name, int32_t value);
void check_device_number(int32_t device);
void check_reserved(int32_t value, const char* name = "reserved");

}  // namespace dmattn
