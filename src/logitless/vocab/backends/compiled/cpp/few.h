// A head's product with a few tokens, whose logits memory holds.
#pragma once
#include "room.h"

struct OfFew {
  Head head;
  int64_t n_tokens, vocab;  // tokens: LANES at most
  float* out;               // a number for each token and entry, those of a token and of an entry so far apart
  int64_t token_stride, entry_stride;
};

static int multiply_for_few(const OfFew& call, int threads) {
  const long size = call.head.size();
  int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    const TileRegisters registers;
    const Room own(ENTRIES * (LANES + size));
    float *tile = own.memory, *packed = tile + ENTRIES * LANES;
    failed |= own.memory == nullptr;
    pack_tokens(call.head, size, call.n_tokens);
#pragma omp for schedule(monotonic : dynamic)
    for (long v = 0; v < call.vocab; v += ENTRIES) {
      if (own.memory == nullptr) continue;
      const long count = std::min(ENTRIES, call.vocab - v);
      pack_entries(call.head, size, v, count, packed);
      make_logits(call.head, size, packed, count, 0, tile);
      for (long n = 0; n < call.n_tokens; n++)
        for (long i = 0; i < count; i++) call.out[n * call.token_stride + (v + i) * call.entry_stride] = tile[i * LANES + n];
    }
  }
  return failed;
}
