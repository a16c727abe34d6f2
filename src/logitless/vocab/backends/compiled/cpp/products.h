// What a frozen head's gradient is made of: the sum of the head's rows, each times its weight in a token's softmax.
#pragma once
#include "product.h"

// What an entry weighs beside w = e^(z - m): w·(z - m), w², w·(z - y - shift), or e^(y - m_ref), y the reference's logit
enum Basis : int64_t { PLOGP, P2, PD, Q };

constexpr long BLOCKS = 4;          // of entries, for which sums pass through the caches once
constexpr long MOST_PANELS = 16;    // of tokens in a task, which has all their weights of these blocks
constexpr long ROWS_AT_ONCE = 128;  // of sums, whose packed numbers stay in a core's second cache

// Weights of several blocks of entries, as pairs, which wait for their products by tiles with a task's tokens
struct Waiting {
  static constexpr long PAIRS = BLOCKS * ENTRIES / 2;
  static constexpr long APART = PAIRS + TILE;  // of packed rows: a power of two would be the same few lines of a cache
  long panels;
  float* packed;                  // [rows, at most ROWS_AT_ONCE][APART]
  float *all_weights, *all_grow;  // [panels][PAIRS][LANES]; [panels][BLOCKS][LANES]: what sums are times before a block
  Waiting(float* memory, long rows, long panels)
      : panels(panels), packed(memory), all_weights(packed + of_rows(rows)), all_grow(all_weights + panels * PAIRS * LANES) {}
  static long of_rows(long rows) { return APART * std::min(ROWS_AT_ONCE, rows); }
  static long numbers(long rows, long panels) { return of_rows(rows) + panels * (PAIRS + BLOCKS) * LANES; }
  // panel: of a call or of a task, whose first one is a multiple of `panels`
  float* weights(long panel, long block) const { return all_weights + (panel % panels * PAIRS + block * ENTRIES / 2) * LANES; }
  float* grow(long panel, long block) const { return all_grow + (panel % panels * BLOCKS + block) * LANES; }
};

// Sums for each token and number of a row; null where there are none
struct Products {
  float *p, *second;  // [panels][rows][LANES]: of weights w, and of those of the second basis
  Basis basis;
  int64_t width;  // numbers of a row, of the head's first factors: a bias is none of them
  int64_t pairs;  // whether weights are rounded to bfloat16, as the rows are, and multiplied for two entries at a time
  bool waits() const { return pairs && MULTIPLIES_TILES; }
  long rows() const { return (width + together() - 1) / together() * together(); }
  // A thread's numbers beside them, for so many panels of tokens
  long room(long panels) const { return waits() ? Waiting::numbers(rows(), std::min(MOST_PANELS, panels)) : ENTRIES * rows(); }
  long together() const { return waits() ? BLOCK : ROWS; }
  Products of(long offset) const { return {p ? p + offset : p, second ? second + offset : second, basis, width, pairs}; }
};

// A tile's weights for its products, and what brings the products before it to what weights are relative to now
struct Weights {
  float *p, *second;  // [ENTRIES][LANES]; null where there are none
  Basis basis;
  float *grow, *scale, *shift;  // [LANES]: of p, before: grow·p; of the second: scale·(second + shift·p)
  const float* outer;           // as a Head's: the weights are times the softcap's derivative
  Weights of(long lane) const {
    if (!p) return *this;
    float* const other = second ? second + lane : second;
    return {p + lane, other, basis, grow + lane, scale + lane, shift + lane, outer ? outer + lane : outer};
  }
  bool has(Basis x) const { return second && basis == x; }
  void bring(Vector s, Vector x) const { store(scale, s), store(shift, x); }
  // A weight of the capped logit z as one of the logit before the cap
  Vector through(Vector weight, Vector z) const {
    if (!outer) return weight;
    const Vector share = larger(all(-1.f), z / load(outer));  // of all that the softcap lets through
    return weight * fma(all(0.f) - share, share, all(1.f));
  }
};

// The policy's weights of an entry: of its logits z, w = e^d and d = z - m
static inline void weigh(const Weights& weights, long at, Vector z, Vector w, Vector d) {
  store(weights.p + at, weights.through(w, z));
  if (weights.has(PLOGP)) store(weights.second + at, weights.through(w * d, z));
  if (weights.has(P2)) store(weights.second + at, weights.through(w * w, z));
}

// The first `width` numbers of `count` rows of a head from v on, as panels [rows / ROWS][ENTRIES][ROWS]
static void pack_numbers(const Head& head, long width, long v, long count, float* packed) {
  for (long f = 0, first = 0; first < width; first += head.factors[f++].size) {
    const Factor& w = head.factors[f];
    if (w.half) pack_columns(Widened(w.entries, v, w.entries_stride, w.size), count, first, packed);
    else pack_columns(Floats(w.entries, v, w.entries_stride, w.size), count, first, packed);
  }
}

// Each half of four vectors as a matrix, transposed
static inline void transpose_fours(__m256* x) {
  const __m256 a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
  const __m256 c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
  x[0] = _mm256_shuffle_ps(a, c, 0x44), x[1] = _mm256_shuffle_ps(a, c, 0xee);
  x[2] = _mm256_shuffle_ps(b, d, 0x44), x[3] = _mm256_shuffle_ps(b, d, 0xee);
}

// `size` numbers of each row from number `first` on, as tiles [size / TILE][PAIRS / TILE][TILE numbers][TILE pairs], with 0
// for entries that there are not; numbers up to a whole block keep what was there, whose sums nobody reads
static void pack_pairs_in_tiles(const Factor& w, long v, long count, long first, long size, float* packed) {
  const uint16_t* x = static_cast<const uint16_t*>(w.entries) + v * w.entries_stride + first;
  const auto at = [&](long i, long k) { return i < count ? x[i * w.entries_stride + k] : uint16_t(0); };
  for (long i = 0; i < 2 * pairs_of_row(count); i += 8)
    for (long k = 0; k < size; k += TILE) {
      float* to = packed + k * Waiting::APART + i / 2 / TILE * TILE * TILE + i / 2 % TILE;
      if (i + 8 > count || k + TILE > size) {
        for (long n = k; n < std::min(k + TILE, size); n++, to += TILE)
          for (long j = 0; j < 4; j++) to[j] = pair_of(at(i + 2 * j, n), at(i + 2 * j + 1, n));
        continue;
      }
      __m256 low[4], high[4];  // pairs of four numbers and, in the other half, of those eight numbers further
#pragma GCC unroll 4
      for (long j = 0; j < 4; j++) {
        const uint16_t* row = x + (i + 2 * j) * w.entries_stride + k;
        __builtin_prefetch(row + 8 * w.entries_stride), __builtin_prefetch(row + 9 * w.entries_stride);
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + w.entries_stride));
        low[j] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(a, b));
        high[j] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(a, b));
      }
      transpose_fours(low), transpose_fours(high);
#pragma GCC unroll 4
      for (long j = 0; j < 4; j++, to += TILE) {
        _mm_storeu_ps(to, _mm256_castps256_ps128(low[j]));
        _mm_storeu_ps(to + 4 * TILE, _mm256_castps256_ps128(high[j]));
        _mm_storeu_ps(to + 8 * TILE, _mm256_extractf128_ps(low[j], 1));
        _mm_storeu_ps(to + 12 * TILE, _mm256_extractf128_ps(high[j], 1));
      }
    }
}

// The rows of a head from v on, packed for its products
static void pack_for(const Products& products, const Head& head, long v, long count, float* packed) {
  const Factor& w = head.factors[0];
  if (products.pairs) pack_columns(PairsOfRows(w.entries, v, w.entries_stride, w.size, count), (count + 1) / 2, 0, packed);
  else pack_numbers(head, products.width, v, count, packed);
}

// Weights of `count` entries as pairs of two entries, in their place or another; 0 for those up to a whole tile. Returns
// how many.
static long pair_weights(long count, const float* weights, float* to) {
  const long pairs = pairs_of_row(count);
  for (long i = 0; i < pairs; i++)
    for (long j = 0; j < LANES; j += WIDTH) {
      const float* x = weights + 2 * i * LANES + j;
      const Vector zero = all(0.f), first = 2 * i < count ? load(x) : zero;
      store(to + i * LANES + j, pairs_of(first, 2 * i + 1 < count ? load(x + LANES) : zero));
    }
  return pairs;
}

// Whether sums of a lane are times something, which is 1 where there is no new maximum
static bool any_grows(const float* grow) {
  uint32_t found = 0;
  for (long j = 0; j < LANES; j += WIDTH) found |= not_at_most(all(1.f), load(grow + j));
  return found;
}

static void grow_products(const float* grow, long rows, float* p) {
  for (long j = 0; j < LANES; j += WIDTH)
    for (long i = j; i < rows * LANES; i += LANES) store(p + i, load(grow + j) * load(p + i));
}

// Brings the products of a panel of tokens to what a tile's weights are relative to
static void move_products(const Weights& weights, long rows, float* p, float* second) {
  const Vector zero = all(0.f), one = all(1.f);
  for (long j = 0; j < LANES; j += WIDTH) {
    const Vector grow = load(weights.grow + j), scale = load(weights.scale + j), shift = load(weights.shift + j);
    if (!(not_at_most(one, grow) | not_at_most(one, scale) | not_at_most(absolute(shift), zero))) continue;
    for (long i = j; i < rows * LANES; i += LANES) {
      const Vector before = load(p + i);
      if (second) store(second + i, times(scale, fma(shift, before, load(second + i))));
      store(p + i, grow * before);
    }
  }
}

// Adds `count` packed entries times their weights, which are made pairs where those are multiplied
static void add_products(const float* packed, float* weights, long count, bool pairs, long rows, float* sums) {
  const long terms = pairs ? pair_weights(count, weights, weights) : count;
  for (long i = 0; i < rows; i += ROWS)
    if (pairs) multiply<true>(packed + i * ENTRIES, weights, terms, sums + i * LANES);
    else multiply<false>(packed + i * ENTRIES, weights, terms, sums + i * LANES);
}

// Adds what waits to a task's sums, for entries from v on up to `end`; grows: whether sums are times something before
static void add_waiting(const Waiting& waiting, const Factor& w, long v, long end, long panels, long rows, bool grows, float* sums) {
  const long blocks = grows ? (end - v + ENTRIES - 1) / ENTRIES : 0;
  for (long first = 0; first < rows; first += ROWS_AT_ONCE) {
    const long some = std::min(ROWS_AT_ONCE, rows - first);
    pack_pairs_in_tiles(w, v, end - v, first, std::min(some, w.size - first), waiting.packed);
    for (long p = 0; p < panels; p++)
      for (long i = 0; i < some; i += BLOCK) {
        float* to = sums + (p * rows + first + i) * LANES;
        long done = 0;  // pairs
        const auto add_up_to = [&](long pair) {
          const float* packed = waiting.packed + i * Waiting::APART + done * TILE;
          const float* weights = waiting.weights(p, 0) + done * LANES;
          if (done < pair) multiply_tiles(packed, TILE * Waiting::APART, weights, pair - done, false, to);
          done = pair;
        };
        for (long b = 0; b < blocks; b++) {
          if (!any_grows(waiting.grow(p, b))) continue;
          add_up_to(b * ENTRIES / 2);
          grow_products(waiting.grow(p, b), BLOCK, to);
        }
        add_up_to(pairs_of_row(end - v));
      }
  }
}
