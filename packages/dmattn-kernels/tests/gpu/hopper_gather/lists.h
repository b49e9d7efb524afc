// Lists of keys, made on the host: which positions see a key, and the lists of row blocks that follow from that.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <queue>
#include <random>
#include <utility>
#include <vector>

constexpr int kRowsOfList = 128;

enum class Kind {
  kRunning,    // the w best keys by score among those up to each position
  kTies,       // the same with few different scores
  kIntervals,  // random intervals, with rows and whole blocks that see nothing
  kMask,       // one list for all rows
};

// (heads, seqlen_k): key j is seen at the positions r with r < end[j] (and j <= r if causal).
inline std::vector<int32_t> make_ends(Kind kind, int heads, int seqlen_k, int window, std::mt19937& random) {
  std::vector<int32_t> ends(size_t(heads) * seqlen_k);
  for (int h = 0; h < heads; ++h) {
    int32_t* end = ends.data() + size_t(h) * seqlen_k;
    if (kind == Kind::kMask) {
      for (int j = 0; j < seqlen_k; ++j) end[j] = int(random() % seqlen_k) < window ? INT_MAX : INT_MIN;
    } else if (kind == Kind::kIntervals) {
      // Nobody sees a key in [dark, light).
      const int dark = seqlen_k >= 600 ? 256 : seqlen_k / 3, light = seqlen_k >= 600 ? 400 : seqlen_k / 2;
      for (int j = 0; j < seqlen_k; ++j) {
        const int length = random() % 10 < 3 ? 0 : random() % 10 < 8 ? int(random() % (2 * window)) : seqlen_k;
        end[j] = std::min(j + length, seqlen_k);
        if (j < dark) end[j] = std::min(end[j], dark);
        if (j >= dark && j < light) end[j] = j;
      }
    } else {
      // The worst on top: the lowest score, of equal ones the earliest key.
      using Scored = std::pair<uint32_t, int>;
      std::priority_queue<Scored, std::vector<Scored>, std::greater<Scored>> kept;
      for (int j = 0; j < seqlen_k; ++j) {
        kept.push({kind == Kind::kTies ? random() % 5 : random(), j});
        if (int(kept.size()) <= window) continue;
        end[kept.top().second] = j;
        kept.pop();
      }
      for (; !kept.empty(); kept.pop()) end[kept.top().second] = seqlen_k;
    }
  }
  return ends;
}

struct Lists {
  int capacity = kRowsOfList, blocks = 1, longest = 0;
  std::vector<int32_t> idx, count, full;
};

inline Lists make_lists(Kind kind, const std::vector<int32_t>& ends, int heads, int seqlen_q, int seqlen_k) {
  Lists lists;
  const int offset = seqlen_k - seqlen_q;
  if (kind != Kind::kMask) lists.blocks = (seqlen_q + kRowsOfList - 1) / kRowsOfList;
  std::vector<std::vector<int32_t>> all(size_t(heads) * lists.blocks);
  for (int h = 0; h < heads; ++h) {
    const int32_t* end = ends.data() + size_t(h) * seqlen_k;
    for (int block = 0; block < lists.blocks; ++block) {
      const int first = block * kRowsOfList + offset, last = std::min(first + kRowsOfList, seqlen_k);
      auto& list = all[size_t(h) * lists.blocks + block];
      std::vector<int32_t> partial;
      for (int j = 0; j < seqlen_k; ++j) {
        if (kind == Kind::kMask) {
          if (end[j] == INT_MAX) list.push_back(j);
        } else if (j <= first && end[j] >= last) {
          list.push_back(j);
        } else if (std::max(j, first) < std::min(end[j], last)) {
          partial.push_back(j);
        }
      }
      lists.full.push_back(int(list.size()));
      list.insert(list.end(), partial.begin(), partial.end());
      lists.count.push_back(int(list.size()));
      lists.longest = std::max(lists.longest, int(list.size()));
    }
  }
  lists.capacity = std::max(1, (lists.longest + kRowsOfList - 1) / kRowsOfList) * kRowsOfList;
  lists.idx.assign(all.size() * lists.capacity, INT_MIN);  // what lies past the zeros must not matter
  for (size_t i = 0; i < all.size(); ++i) {
    std::copy(all[i].begin(), all[i].end(), lists.idx.begin() + i * lists.capacity);
    const size_t stop = (all[i].size() + kRowsOfList - 1) / kRowsOfList * kRowsOfList;
    for (size_t j = all[i].size(); j < stop; ++j) lists.idx[i * lists.capacity + j] = 0;
  }
  return lists;
}

// Pairs of a row and a key that sees it, of one head.
inline double count_pairs(const std::vector<int32_t>& ends, int heads, int seqlen_q, int seqlen_k) {
  double pairs = 0;
  for (int h = 0; h < heads; ++h) {
    for (int j = 0; j < seqlen_k; ++j) {
      const int end = std::min(ends[size_t(h) * seqlen_k + j], seqlen_k);
      pairs += std::max(0, end - std::max(j, seqlen_k - seqlen_q));
    }
  }
  return pairs / heads;
}
