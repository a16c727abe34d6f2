// The words that vocab/noise.py makes noise of, by Philox-4x32-10 (Salmon et al., SC 2011), looked through for large ones.
#pragma once
#include <omp.h>

#include <algorithm>

#include "vectors.h"

// MULTIPLIERS, WEYL and ROUNDS are those of vocab/noise.py: see library.py
constexpr uint32_t multipliers[] = {MULTIPLIERS}, weyl[] = {WEYL};
constexpr long RUN = 4096;  // blocks of one token that a thread looks through at a time

struct Search {
  const int64_t *seeds, *positions;  // a number a token
  const int64_t* least;              // what one of a block's four words has to reach, of any 64 bits
  const int64_t* blocks;             // their numbers, the same for all tokens
  int64_t n_tokens, n_blocks;
  uint8_t* reached;  // [n_tokens][n_blocks], 1 or 0
};

// The largest of each block's four words
static inline Words largest_of_four(Words block, int64_t seed, int64_t position) {
  Words a = block, b = all_words(position), c = all_words(position >> 32), d = all_words(0);
  uint32_t first = seed, second = seed >> 32;
#pragma GCC unroll 16
  for (long i = 0; i < ROUNDS; i++, first += weyl[0], second += weyl[1]) {
    const Words p = product(a, all_words(multipliers[0])), q = product(c, all_words(multipliers[1]));
    a = upper(q) ^ b ^ all_words(first), b = q;
    c = upper(p) ^ d ^ all_words(second), d = p;
  }
  return larger_words(larger_words(a, b), larger_words(c, d));
}

// Those of token n from `first` to `end`
static void search_run(const Search& call, long n, long first, long end) {
  uint8_t* reached = call.reached + n * call.n_blocks;
  std::fill(reached + first, reached + end, 0);
  for (long i = first; i < end; i += WORDS) {
    int64_t last[WORDS] = {};
    const long count = std::min(WORDS, end - i);
    if (count < WORDS) std::copy_n(call.blocks + i, count, last);
    const Words block = load_words(count < WORDS ? last : call.blocks + i);
    const Words largest = largest_of_four(block, call.seeds[n], call.positions[n]);
    uint32_t found = words_at_least(largest, all_words(call.least[n])) & ((1u << count) - 1);
    for (; found; found &= found - 1) reached[i + __builtin_ctz(found)] = 1;
  }
}

static void search_words(const Search& call, int threads) {
  const long runs = (call.n_blocks + RUN - 1) / RUN;
  const bool many = call.n_tokens * call.n_blocks > RUN;
#pragma omp parallel for if (many) num_threads(threads) collapse(2) schedule(static)
  for (long n = 0; n < call.n_tokens; n++)
    for (long r = 0; r < runs; r++) search_run(call, n, r * RUN, std::min(call.n_blocks, (r + 1) * RUN));
}
