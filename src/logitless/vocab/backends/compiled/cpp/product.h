// A head's product with some tokens, a tile at a time: ROWS entries of the vocabulary times LANES tokens, whose logits
// are summed in registers from packed operands (Goto and van de Geijn, doi:10.1145/1356052.1356053).
#pragma once
#include <algorithm>
#include <cstring>

#include "vectors.h"

#if defined(__AVX512F__)
constexpr long ROWS = 12, VECTORS = 2;  // as many sums as there are registers for
#else
constexpr long ROWS = 4, VECTORS = 3;
#endif
constexpr long LANES = WIDTH * VECTORS;
constexpr long ENTRIES = 96;  // whose packed rows stay in a core's second cache
constexpr long DEPTH = 512;   // terms of the products at a time, so that panels of both operands stay in its first ones
constexpr long CHAIN = 128;   // terms that are added up one after another: longer chains lose digits

// tokens (n, size) times entries (vocab, size), the numbers of a row side by side: a weight's, an adapter's or a bias's
struct Factor {
  const float* tokens;
  int64_t tokens_stride;
  const void* entries;
  int64_t entries_stride, size, half;  // half: bfloat16 entries, else float
  float entry(long v, long k) const {
    if (!half) return static_cast<const float*>(entries)[v * entries_stride + k];
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(entries)[v * entries_stride + k]) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
};

// The sum of its factors' products, or where it is capped outer·tanh of that
struct Head {
  const Factor* factors;
  int64_t n_factors;
  const float* outer;  // a number a token, or null
  float* packed;       // room for the tokens
  long size() const {
    long sum = 0;
    for (long f = 0; f < n_factors; f++) sum += factors[f].size;
    return sum;
  }
};

// `count` rows of a factor from v on, as panel[k][row] of panels of ROWS that lie `stride` apart; rows up to ENTRIES are 0
static void pack_rows(const Factor& w, long v, long count, long stride, float* packed) {
  for (long first = 0; first < ENTRIES; first += ROWS, packed += stride) {
    const long rows = std::max(0L, std::min(ROWS, count - first));
    const bool plain = rows == ROWS && !w.half;
    const long some = plain ? w.size / 4 * 4 : 0;
    const float* x = static_cast<const float*>(w.entries) + (v + first) * w.entries_stride;
    for (long k = 0; k < some; k += 4)
      for (long i = 0; i < ROWS; i += 4) {
        const float* y = x + i * w.entries_stride + k;
        if (k % 16 == 0)  // a line of memory of the next panel
          for (long j = 0; j < 4; j++) __builtin_prefetch(y + (ROWS + j) * w.entries_stride);
        __m128 a = _mm_loadu_ps(y), b = _mm_loadu_ps(y + w.entries_stride);
        __m128 c = _mm_loadu_ps(y + 2 * w.entries_stride), d = _mm_loadu_ps(y + 3 * w.entries_stride);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        float* to = packed + k * ROWS + i;
        _mm_storeu_ps(to, a), _mm_storeu_ps(to + ROWS, b);
        _mm_storeu_ps(to + 2 * ROWS, c), _mm_storeu_ps(to + 3 * ROWS, d);
      }
    for (long k = some; k < w.size; k++)
      for (long i = 0; i < ROWS; i++) packed[k * ROWS + i] = i < rows ? w.entry(v + first + i, k) : 0.f;
  }
}

// A head's rows, those of one factor after those of another
static void pack_entries(const Head& head, long size, long v, long count, float* packed) {
  for (long f = 0; f < head.n_factors; packed += ROWS * head.factors[f++].size)
    pack_rows(head.factors[f], v, count, ROWS * size, packed);
}

// A head's tokens as panels [n / LANES][size][LANES], with 0 for tokens that there are not; a loop of all threads
static void pack_tokens(const Head& head, long size, long n_tokens) {
#pragma omp for
  for (long p = 0; p < (n_tokens + LANES - 1) / LANES; p++) {
    float* packed = head.packed + p * size * LANES;
    for (long f = 0; f < head.n_factors; f++) {
      const Factor& w = head.factors[f];
      for (long k = 0; k < w.size; k++)
        for (long n = p * LANES; n < (p + 1) * LANES; n++)
          *packed++ = n < n_tokens ? w.tokens[n * w.tokens_stride + k] : 0.f;
    }
  }
}

// logits[ROWS][LANES] += entries[terms][ROWS] times tokens[terms][LANES]
static void multiply(const float* entries, const float* tokens, long terms, float* logits) {
  Vector sum[ROWS][VECTORS];
#pragma GCC unroll 16
  for (long i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (long j = 0; j < VECTORS; j++) sum[i][j] = all(0.f);
  for (long k = 0; k < terms; k++) {
    Vector x[VECTORS];
#pragma GCC unroll 4
    for (long j = 0; j < VECTORS; j++) x[j] = load(tokens + k * LANES + j * WIDTH);
#pragma GCC unroll 16
    for (long i = 0; i < ROWS; i++) {
      const Vector w = all(entries[k * ROWS + i]);
#pragma GCC unroll 4
      for (long j = 0; j < VECTORS; j++) sum[i][j] = fma(w, x[j], sum[i][j]);
    }
  }
#pragma GCC unroll 16
  for (long i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (long j = 0; j < VECTORS; j++) {
      float* z = logits + i * LANES + j * WIDTH;
      store(z, load(z) + sum[i][j]);
    }
}

// logits[ENTRIES][LANES] of `count` packed entries and a panel of tokens, the one of number `panel`
static void make_logits(const Head& head, long size, const float* entries, long count, long panel, float* logits) {
  const float* tokens = head.packed + panel * size * LANES;
  std::memset(logits, 0, ENTRIES * LANES * sizeof(float));
  for (long k = 0; k < size; k += DEPTH)
    for (long i = 0; i < count; i += ROWS)
      for (long c = k; c < std::min(size, k + DEPTH); c += CHAIN)
        multiply(entries + i * size + c * ROWS, tokens + c * LANES, std::min(CHAIN, size - c), logits + i * LANES);
  if (head.outer == nullptr) return;
  for (long j = 0; j < LANES; j += WIDTH) {
    const Vector outer = load(head.outer + panel * LANES + j);
    for (long i = j; i < count * LANES; i += LANES) store(logits + i, outer * tanh(load(logits + i)));
  }
}
