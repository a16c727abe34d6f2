// What a frozen head's gradient is made of: the sum of the head's rows, each times its weight in a token's softmax.
#pragma once
#include "product.h"

// Sums for each token and number of a row; null where there are none
struct Products {
  float *p, *plogp;  // [panels][rows][LANES]: of weights e^(z - m), and, or null, of these times z - m
  int64_t width;     // numbers of a row, of the head's first factors: a bias is none of them
  long rows() const { return (width + ROWS - 1) / ROWS * ROWS; }
  Products of(long offset) const { return {p ? p + offset : p, plogp ? plogp + offset : plogp, width}; }
};

// A tile's weights for its products, and what brings the products before it to the new maxima
struct Weights {
  float *p, *plogp;    // [ENTRIES][LANES]; null where there are none
  float *grow, *step;  // [LANES]: e^(m before - m), m before - m
  const float* outer;  // as a Head's: the weights are times the softcap's derivative
  Weights of(long lane) const {
    if (!p) return *this;
    return {p + lane, plogp ? plogp + lane : plogp, grow + lane, step + lane, outer ? outer + lane : outer};
  }
};

// The weights of an entry: of its logits z, w = e^d and d = z - m
static inline void weigh(const Weights& weights, long at, Vector z, Vector w, Vector d) {
  if (weights.outer) {
    const Vector share = larger(all(-1.f), z / load(weights.outer));  // of all that the softcap lets through
    w = w * fma(all(0.f) - share, share, all(1.f));
  }
  store(weights.p + at, w);
  if (weights.plogp) store(weights.plogp + at, w * d);
}

// The first `width` numbers of `count` rows of a head from v on, as panels [rows / ROWS][ENTRIES][ROWS]
static void pack_numbers(const Head& head, long width, long v, long count, float* packed) {
  for (long f = 0, first = 0; first < width; first += head.factors[f++].size) {
    const Factor& w = head.factors[f];
    for (long i = 0; i < count; i++) {
      const float* row = static_cast<const float*>(w.entries) + (v + i) * w.entries_stride;
      for (long k = 0, some; k < w.size; k += some) {
        const long panel = (first + k) / ROWS, place = (first + k) % ROWS;
        float* to = packed + panel * ENTRIES * ROWS + i * ROWS + place;
        some = std::min(ROWS - place, w.size - k);
        if (some == ROWS && !w.half) {
          std::memcpy(to, row + k, ROWS * sizeof(float));
        } else {
          for (long j = 0; j < some; j++) to[j] = w.entry(v + i, k + j);
        }
      }
    }
  }
}

// Brings the products of a panel of tokens to the maxima of a tile
static void move_products(const Weights& weights, long rows, float* p, float* plogp) {
  for (long j = 0; j < LANES; j += WIDTH) {
    const Vector grow = load(weights.grow + j), step = load(weights.step + j);
    if (!not_at_most(all(0.f), step)) continue;
    for (long i = j; i < rows * LANES; i += LANES) {
      const Vector before = load(p + i);
      if (plogp) store(plogp + i, grow * fma(step, before, load(plogp + i)));
      store(p + i, grow * before);
    }
  }
}

// Adds `count` entries, packed as `pack_numbers` does, times their weights
static void add_products(const float* packed, const float* weights, long count, long rows, float* sums) {
  for (long i = 0; i < rows; i += ROWS) multiply(packed + i * ENTRIES, weights, count, sums + i * LANES);
}
