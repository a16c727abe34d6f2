// A head's product with some tokens, a tile at a time: ROWS entries of the vocabulary times LANES tokens, whose logits
// are summed in registers from packed operands (Goto and van de Geijn, doi:10.1145/1356052.1356053).
#pragma once
#include "packing.h"

constexpr long DEPTH = 512;   // terms of the products at a time, so that panels of both operands stay in its first ones
constexpr long CHAIN = 128;   // terms that are added up one after another: longer chains lose digits
static_assert(DEPTH / 2 % TILE == 0);

// Pairs of a packed row of `size` numbers: whole tiles of them, where those are multiplied
static long pairs_of_row(long size) {
  const long pairs = (size + 1) / 2;
  return MULTIPLIES_TILES ? (pairs + TILE - 1) / TILE * TILE : pairs;
}

// tokens (n, size) times entries (vocab, size), the numbers of a row side by side: a weight's, an adapter's or a bias's
struct Factor {
  const float* tokens;
  int64_t tokens_stride;
  const void* entries;
  int64_t entries_stride, size, half;  // half: bfloat16 entries, else float
  int64_t pairs;                       // whether tokens are bfloat16, too, and multiplied by two numbers at a time
  long length() const { return pairs ? pairs_of_row(size) : size; }  // of a packed row, where a pair has a float's place
  float entry(long v, long k) const {
    const long at = v * entries_stride + k;
    return half ? widened(static_cast<const uint16_t*>(entries)[at]) : static_cast<const float*>(entries)[at];
  }
};

// The sum of its factors' products, or where it is capped outer·tanh of that
struct Head {
  const Factor* factors;  // of which only the first may have pairs
  int64_t n_factors;
  const float* inner;  // a number a token, by which the sums of pairs are multiplied; or null
  const float* outer;  // a number a token, or null
  float* packed;       // room for the tokens
  long size() const {
    long sum = 0;
    for (long f = 0; f < n_factors; f++) sum += factors[f].length();
    return sum;
  }
  long pairs() const { return n_factors && factors[0].pairs ? factors[0].length() : 0; }
};

// `count` rows of pairs as a product reads them
template <class Numbers>
static void pack_rows(const Numbers& of, long count, long length, float* packed) {
  if (MULTIPLIES_TILES) pack_tiles(of, count, length, packed);
  else pack_panels(of, count, ROWS * length, packed);
}

// A head's rows: pairs, and after them the numbers of all other factors, those of one after those of another
static void pack_entries(const Head& head, long size, long v, long count, float* packed) {
  const long pairs = head.pairs();
  if (pairs) {
    const Factor& w = head.factors[0];
    pack_rows(Pairs(w.entries, v, w.entries_stride, w.size), count, pairs, packed);
    packed += ENTRIES * pairs;
  }
  for (long f = pairs ? 1 : 0; f < head.n_factors; packed += ROWS * head.factors[f++].size) {
    const Factor& w = head.factors[f];
    if (w.half) pack_panels(Widened(w.entries, v, w.entries_stride, w.size), count, ROWS * (size - pairs), packed);
    else pack_panels(Floats(w.entries, v, w.entries_stride, w.size), count, ROWS * (size - pairs), packed);
  }
}

// A head's tokens as panels [n / LANES][size][LANES], with 0 for tokens that there are not; a loop of all threads
static void pack_tokens(const Head& head, long size, long n_tokens) {
#pragma omp for
  for (long p = 0; p < (n_tokens + LANES - 1) / LANES; p++) {
    float* packed = head.packed + p * size * LANES;
    for (long f = 0; f < head.n_factors; f++) {
      const Factor& w = head.factors[f];
      for (long k = 0; k < w.length(); k++)
        for (long n = p * LANES; n < (p + 1) * LANES; n++) {
          const float* x = w.tokens + n * w.tokens_stride;
          if (n >= n_tokens) *packed++ = 0.f;
          else if (w.pairs) *packed++ = rounded_pair(2 * k < w.size ? x[2 * k] : 0.f, 2 * k + 1 < w.size ? x[2 * k + 1] : 0.f);
          else *packed++ = x[k];
        }
    }
  }
}

// logits[ROWS][LANES] += entries[terms][ROWS] times tokens[terms][LANES]; pairs: a term is one of bfloat16
template <bool pairs>
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
      for (long j = 0; j < VECTORS; j++) sum[i][j] = pairs ? fma_pairs(w, x[j], sum[i][j]) : fma(w, x[j], sum[i][j]);
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

// logits[ENTRIES][LANES] += `count` packed entries times a panel of tokens, `size` terms of each
template <bool pairs>
static void add_terms(const float* entries, const float* tokens, long size, long count, float* logits) {
  constexpr long chain = pairs ? CHAIN / 2 : CHAIN;
  for (long k = 0; k < size; k += DEPTH)
    for (long i = 0; i < count; i += ROWS)
      for (long c = k; c < std::min(size, k + DEPTH); c += chain)
        multiply<pairs>(entries + i * size + c * ROWS, tokens + c * LANES, std::min(chain, size - c), logits + i * LANES);
}

// The same of pairs, by tiles where those are multiplied, whose first terms are the logits
static void add_pairs(const float* entries, const float* tokens, long size, long count, float* logits) {
  if constexpr (MULTIPLIES_TILES) {
    for (long k = 0; k < size; k += DEPTH / 2)
      for (long i = 0; i < count; i += BLOCK)
        multiply_tiles(entries + i * size + k * TILE, TILE * size, tokens + k * LANES, std::min(DEPTH / 2, size - k), k == 0, logits + i * LANES);
  } else {
    add_terms<true>(entries, tokens, size, count, logits);
  }
}

// logits[ENTRIES][LANES] of `count` packed entries and a panel of tokens, the one of number `panel`
static void make_logits(const Head& head, long size, const float* entries, long count, long panel, float* logits) {
  const float* tokens = head.packed + panel * size * LANES;
  const long pairs = head.pairs();
  if (!(pairs && MULTIPLIES_TILES)) std::memset(logits, 0, count * LANES * sizeof(float));
  if (pairs) add_pairs(entries, tokens, pairs, count, logits);
  if (head.inner)
    for (long j = 0; j < LANES; j += WIDTH) {
      const Vector inner = load(head.inner + panel * LANES + j);
      for (long i = j; i < count * LANES; i += LANES) store(logits + i, inner * load(logits + i));
    }
  add_terms<false>(entries + ENTRIES * pairs, tokens + pairs * LANES, size - pairs, count, logits);
  if (head.outer == nullptr) return;
  for (long j = 0; j < LANES; j += WIDTH) {
    const Vector outer = load(head.outer + panel * LANES + j);
    for (long i = j; i < count * LANES; i += LANES) store(logits + i, outer * tanh(load(logits + i)));
  }
}
