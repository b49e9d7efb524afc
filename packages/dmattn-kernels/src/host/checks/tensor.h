// Checks on one tensor. Each fails with the tensor's name, what it is and what was wanted.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "dmattn/dmattn.h"
#include "host/checks/validate.h"

namespace dmattn {

// "(2, 128, 4, 64)"
std::string text(const int64_t* values, int n);

// Present, of that many dimensions, with extents and a size that kernels can count.
void check_rank(const char* name, const dmattn_tensor& t, int ndim);
void check_dtype(const char* name, const dmattn_tensor& t, std::initializer_list<int32_t> allowed);
// check_rank, and exactly this shape; `meaning` says where it comes from.
void check_shape(const char* name, const dmattn_tensor& t, std::initializer_list<int64_t> shape, const char* meaning);
void check_unit_last_stride(const char* name, const dmattn_tensor& t);
// No two indices are the same element: two threads may not write one.
void check_writable(const char* name, const dmattn_tensor& t);
void check_contiguous(const char* name, const dmattn_tensor& t);
// From one row of the innermost dimension to the next, of at least two dimensions.
int64_t row_pitch(const dmattn_tensor& t);
// Contiguous, but that its rows may be further apart.
void check_rows_apart(const char* name, const dmattn_tensor& t);
// Set, unless that may come later, and aligned to the element.
void check_pointer(const char* name, const dmattn_tensor& t, PointerCheck& pointers);

// What a selection over (batch, heads) lists holds.
struct SelectionExtents {
  int64_t batch, heads, blocks, capacity, seqlen_k;
};

// The lists of a causal selection are those of blocks of rows; otherwise there is one list.
int64_t selection_blocks(int64_t seqlen_q, bool is_causal);
void check_selection(const dmattn_key_selection& s, const SelectionExtents& e, bool is_causal, PointerCheck& pointers);

void check_head_dim(const char* name, int64_t head_dim);
void check_finite(const char* name, float value);
void check_flag(const char* name, int32_t value);
void check_device_number(int32_t device);
void check_reserved(int32_t value, const char* name = "reserved");

}  // namespace dmattn
