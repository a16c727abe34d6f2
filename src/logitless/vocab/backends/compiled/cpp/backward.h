// Backward's products of the logits' gradient, or of weights which that is a multiple of: with the tokens for each entry
// of the vocabulary, and with the entries for each token.
#pragma once
#include <omp.h>

#include "products.h"
#include "room.h"

// The logits' gradient, [vocab][tokens]; where m is given, logits, of which weights e^(z - m) are made in their place
struct Tile {
  float* numbers;
  const float* m;  // room for all LANES; or null
  int64_t n_tokens, vocab;
};

// The entries' products: out[v] = Σ weight[v][n]·hidden[n]. What a head's product has as tokens, the numbers of a hidden
// state are here, and its numbers are the tokens.
struct OfEntries {
  Tile tile;
  Head tokens;        // one factor, (size, n_tokens)
  int64_t size;       // numbers of a token
  float* out;
  int64_t stride, adds;  // numbers from one entry's to the next one's; whether they are added to what is there
  const float* scale;    // a number a token, which weights are multiplied by before they are pairs; or null
};

// The tokens' products, as a frozen head's
struct OfTokens {
  Tile tile;
  Head head;
  Products products;
  int64_t parts;
};

// Makes weights of `count` entries' logits from v on
static void weigh(const Tile& tile, long v, long count) {
  for (long i = 0; i < count; i++) {
    float* z = tile.numbers + (v + i) * tile.n_tokens;
    long n = 0;
    for (; n + WIDTH <= tile.n_tokens; n += WIDTH) store_anywhere(z + n, exponential(load_anywhere(z + n) - load(tile.m + n)));
    if (n == tile.n_tokens) continue;
    alignas(64) float rest[WIDTH] = {};
    std::copy_n(z + n, tile.n_tokens - n, rest);
    store(rest, exponential(load(rest) - load(tile.m + n)));
    std::copy_n(rest, tile.n_tokens - n, z + n);
  }
}

// A panel of tokens' numbers of `count` entries from v on, as [ENTRIES][LANES]; lanes without a token keep what they have
static void read_panel(const Tile& tile, long v, long count, long panel, float* to) {
  const long first = panel * LANES, tokens = std::min(LANES, tile.n_tokens - first);
  const float* from = tile.numbers + v * tile.n_tokens + first;
  for (long i = 0; i < count; i++, from += tile.n_tokens, to += LANES) {
    if (tokens < LANES) {
      std::copy_n(from, tokens, to);
      continue;
    }
    for (long j = 0; j < LANES; j += WIDTH) {
      __builtin_prefetch(from + LANES + j);  // of the next panel
      store(to + j, load_anywhere(from + j));
    }
  }
}

// Brings the lines of memory that a tile of products is added to
static void prefetch(const float* out, long count, long numbers, long stride) {
  for (long i = 0; i < count; i++, out += stride)
    for (long j = 0; j < numbers; j += 16) __builtin_prefetch(out + j, 1);
}

// A tile of products, `numbers` of each of `count` entries, to where they are wanted
static void put(const float* tile, long count, long numbers, bool adds, long stride, float* out) {
  for (long i = 0; i < count; i++, tile += LANES, out += stride) {
    long j = 0;
    for (; j + WIDTH <= numbers; j += WIDTH)
      store_anywhere(out + j, adds ? load_anywhere(out + j) + load(tile + j) : load(tile + j));
    for (; j < numbers; j++) out[j] = adds ? out[j] + tile[j] : tile[j];
  }
}

static int multiply_for_entries(const OfEntries& call, int threads) {
  const long n_tokens = call.tile.n_tokens, panels = (call.size + LANES - 1) / LANES;
  const bool pairs = call.tokens.factors[0].pairs;
  const long length = call.tokens.size(), together = pairs ? ENTRIES : FP32_ENTRIES;
  const long step = pairs && MULTIPLIES_TILES ? ENTRIES : ROWS;  // entries whose lines memory brings at once
  int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    const TileRegisters registers;
    const Room own(ENTRIES * (LANES + length));
    float *tile = own.memory, *packed = tile + ENTRIES * LANES;
    failed |= own.memory == nullptr;
    pack_tokens(call.tokens, length, call.size);
#pragma omp for schedule(monotonic : dynamic)
    for (long v = 0; v < call.tile.vocab; v += together) {
      if (own.memory == nullptr) continue;
      const long count = std::min(together, call.tile.vocab - v);
      if (call.tile.m) weigh(call.tile, v, count);
      const float* numbers = call.tile.numbers;
      if (pairs) pack_rows(Rounded(numbers, v, n_tokens, n_tokens, call.scale), count, length, packed);
      else pack_panels(Floats(numbers, v, n_tokens, n_tokens), count, ROWS * length, packed);
      for (long p = 0; p < panels; p++) {
        const long some = std::min(LANES, call.size - p * LANES);
        float* to = call.out + v * call.stride + p * LANES;
        for (long i = 0; i < count; i += step, to += step * call.stride) {
          const long rows = std::min(step, count - i);
          if (call.adds) prefetch(to, rows, some, call.stride);
          make_logits(call.tokens, length, packed + i * length, rows, p, tile);
          put(tile, rows, some, call.adds, call.stride, to);
        }
      }
    }
  }
  return failed;
}

static int multiply_for_tokens(const OfTokens& call, int threads) {
  const bool waits = call.products.waits();
  const Tasks tasks(call.tile.n_tokens, call.tile.vocab, call.parts, threads, waits ? MOST_PANELS : 0);
  const long rows = call.products.rows(), together = call.products.pairs ? ENTRIES : FP32_ENTRIES;
  int failed = 0;
  std::fill_n(call.products.p, call.parts * tasks.panels * rows * LANES, 0.f);
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    const TileRegisters registers;
    const Room own(ENTRIES * LANES + call.products.room(tasks.group));
    float *weights = own.memory, *packed = weights + ENTRIES * LANES;
    const Waiting waiting(packed, rows, tasks.group);
    failed |= own.memory == nullptr;
#pragma omp for collapse(2) schedule(monotonic : dynamic)
    for (long i = 0; i < call.parts; i++)
      for (long g = 0; g < tasks.groups; g++) {
        if (own.memory == nullptr) continue;
        const long end = std::min(call.tile.vocab, (i + 1) * tasks.part), first = g * tasks.group;
        const long last = std::min(tasks.panels, first + tasks.group);
        float* sums = call.products.p + i * tasks.panels * rows * LANES;
        for (long v = i * tasks.part; v < end; v += BLOCKS * together) {
          const long stop = std::min(end, v + BLOCKS * together);
          for (long at = v; at < stop; at += together) {
            const long count = std::min(together, stop - at);
            if (!waits) pack_for(call.products, call.head, at, count, packed);
            for (long p = first; p < last; p++) {
              read_panel(call.tile, at, count, p, weights);
              if (waits) pair_weights(count, weights, waiting.weights(p, (at - v) / together));
              else add_products(packed, weights, count, call.products.pairs, rows, sums + p * rows * LANES);
            }
          }
          if (waits) add_waiting(waiting, call.head.factors[0], v, stop, last - first, rows, false, sums + first * rows * LANES);
        }
      }
  }
  return failed;
}
