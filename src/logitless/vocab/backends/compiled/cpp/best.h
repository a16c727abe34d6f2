// The best entries of each token that one thread has seen, and which those of all threads are.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

// A logit with its entry as a number: the higher one of a better entry, of equal logits of the one that comes first
static inline uint64_t key_of(float z, uint32_t entry) {
  uint32_t bits = 0x7fc00000;
  if (z == z) std::memcpy(&bits, &z, sizeof bits);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(bits) << 32 | uint32_t(~entry);
}
static inline float logit_of(uint64_t key) {
  uint32_t bits = key >> 32;
  bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
  float z;
  std::memcpy(&z, &bits, sizeof z);
  return z;
}
static inline int64_t entry_of(uint64_t key) { return uint32_t(~key); }

// Entries wait in the room beside a token's k best; where it is full, only the best of all stay. They come in order, so
// that one that equals the k-th best is not among them.
struct Best {
  uint64_t* keys;    // [tokens][room]
  float* least;      // what an entry has to beat; NaN, which nothing is at most, before a token has k
  int32_t* waiting;  // how many keys a token has
  int64_t k, room;

  void add(long token, float z, uint32_t entry) {
    uint64_t* own = keys + token * room;
    int32_t& count = waiting[token];
    own[count++] = key_of(z, entry);
    if (count < room) return;
    std::nth_element(own, own + k - 1, own + room, std::greater<uint64_t>());
    count = k;
    least[token] = logit_of(own[k - 1]);
  }

  // Those of a thread, behind the ones of those before it, for so many tokens; empty
  Best of_thread(long thread, long tokens) const {
    const long first = thread * tokens;
    std::fill_n(least + first, tokens, NAN);
    std::fill_n(waiting + first, tokens, 0);
    return {keys + first * room, least + first, waiting + first, k, room};
  }

  // A token's k best of those of all threads, best first; -inf and -1 where there are less. Reorders those of the token.
  void of_all(long threads, long tokens, long token, float* logits, int64_t* entries) const {
    uint64_t* all = keys + token * room;
    long count = waiting[token];
    for (long t = 1; t < threads; t++) {
      const long other = t * tokens + token;
      for (long i = 0; i < waiting[other]; i++) {
        if (count == room) {
          std::nth_element(all, all + k - 1, all + room, std::greater<uint64_t>());
          count = k;
        }
        all[count++] = keys[other * room + i];
      }
    }
    const long kept = std::min<long>(k, count);
    std::partial_sort(all, all + kept, all + count, std::greater<uint64_t>());
    for (long i = 0; i < k; i++) {
      logits[i] = i < kept ? logit_of(all[i]) : -INFINITY;
      entries[i] = i < kept ? entry_of(all[i]) : -1;
    }
  }
};
