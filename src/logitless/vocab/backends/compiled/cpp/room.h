// A thread's memory, and how tokens and the vocabulary are divided among threads.
#pragma once
#include <algorithm>
#include <cstdlib>

#include "product.h"

constexpr long PARTS = 32;  // of the vocabulary, at most
constexpr long TASKS = 4;   // a thread, where there are so many: the last ones end together
constexpr long PANELS = 8;  // of tokens in a task, for which entries are packed, where that leaves all threads one

// Zeros for one thread; no memory where there is none
struct Room {
  float* memory;
  explicit Room(long numbers)
      : memory(static_cast<float*>(std::aligned_alloc(64, (numbers * sizeof(float) + 63) / 64 * 64))) {
    if (memory) std::fill_n(memory, numbers, 0.f);
  }
  Room(const Room&) = delete;
  ~Room() { std::free(memory); }
};

// A task is a part of the vocabulary, in whole blocks, for a group of panels of tokens
struct Tasks {
  long panels, part, groups, group;
  // limit: the most panels of a group, where there is one
  Tasks(long n_tokens, long vocab, long parts, long threads, long limit = 0) {
    panels = (n_tokens + LANES - 1) / LANES;
    part = ((vocab + parts - 1) / parts + ENTRIES - 1) / ENTRIES * ENTRIES;
    const long most = std::max((threads + parts - 1) / parts, panels / (limit ? limit : PANELS));
    groups = std::min({panels, most, (TASKS * threads + parts - 1) / parts});
    if (limit) {  // and all threads have as many
      const long least = std::max(groups, (panels + limit - 1) / limit), together = (threads + parts - 1) / parts;
      groups = std::min(panels, (least + together - 1) / together * together);
    }
    group = (panels + groups - 1) / groups;
    groups = (panels + group - 1) / group;
  }
};
