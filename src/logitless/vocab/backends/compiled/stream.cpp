// Sums over a vocabulary of logits that no memory holds, on an x86 processor: docs/decisions/0051.
//
// A tile of logits is ROWS entries of the vocabulary times LANES tokens, multiplied in registers from packed operands
// (Goto and van de Geijn, doi:10.1145/1356052.1356053) and added to what each token has so far before the next one is
// made. Each token's numbers are added up in one order, whatever the number of threads.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__)
using Vector = __m512;
constexpr long WIDTH = 16, ROWS = 12, VECTORS = 2;  // as many sums as there are registers for
static inline Vector load(const float* x) { return _mm512_load_ps(x); }
static inline void store(float* x, Vector v) { _mm512_store_ps(x, v); }
static inline Vector all(float x) { return _mm512_set1_ps(x); }
static inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }  // b where one is NaN
static inline Vector nearest(Vector x) { return _mm512_roundscale_ps(x, 8); }
static inline Vector times_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }  // x·2^n
static inline Vector where_equal(Vector a, Vector b, Vector x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), x);
}
static inline Vector where_greater(Vector a, Vector b, Vector x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x);
}
#else
using Vector = __m256;
constexpr long WIDTH = 8, ROWS = 4, VECTORS = 3;
static inline Vector load(const float* x) { return _mm256_load_ps(x); }
static inline void store(float* x, Vector v) { _mm256_store_ps(x, v); }
static inline Vector all(float x) { return _mm256_set1_ps(x); }
static inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
static inline Vector nearest(Vector x) { return _mm256_round_ps(x, 8); }
static inline Vector power(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
static inline Vector times_power(Vector x, Vector n) {  // in two steps, so that what is too small is 0
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  return x * power(half) * power(_mm256_sub_epi32(whole, half));
}
static inline Vector where_equal(Vector a, Vector b, Vector x) {
  return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ), x);
}
static inline Vector where_greater(Vector a, Vector b, Vector x) {
  return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), x);
}
#endif

constexpr long LANES = WIDTH * VECTORS;
constexpr long ENTRIES = 96;  // whose packed rows stay in a core's second cache
constexpr long DEPTH = 512;   // terms of the products at a time, so that panels of both operands stay in its first ones
constexpr long CHAIN = 128;   // terms that are added up one after another: longer chains lose digits
constexpr long PARTS = 16;    // of the vocabulary, each with sums of its own
// EMPTY and MASK are those of algebra/online_softmax.py: see stream.py

// e^x for x <= 0, to the last digit or two; 0 below -104; NaN stays
static inline Vector exponential(Vector x) {
  x = larger(all(-150.f), x);
  const Vector n = nearest(x * all(1.44269504088896341f));
  Vector r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Vector p = all(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, all(c));
  return times_power(fma(p, r * r, r + all(1.f)), n);
}

struct Weight {
  const void* data;
  long stride;
  bool half;  // bfloat16, or float
  float at(long v, long k) const {
    if (!half) return static_cast<const float*>(data)[v * stride + k];
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(data)[v * stride + k]) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
};

// `count` rows of the weight from v on as panels of ROWS, panel[k][row]; rows up to ENTRIES are 0
static void pack_entries(const Weight& w, long v, long count, long size, float* packed) {
  for (long first = 0; first < ENTRIES; first += ROWS, packed += ROWS * size) {
    const long rows = std::max(0L, std::min(ROWS, count - first));
    if (rows == ROWS && !w.half) {
      const float* x = static_cast<const float*>(w.data) + (v + first) * w.stride;
      for (long k = 0; k < size / 4 * 4; k += 4)
        for (long i = 0; i < ROWS; i += 4) {
          const float* y = x + i * w.stride + k;
          if (k % 16 == 0)  // a line of memory of the next panel
            for (long j = 0; j < 4; j++) __builtin_prefetch(y + (ROWS + j) * w.stride);
          __m128 a = _mm_loadu_ps(y), b = _mm_loadu_ps(y + w.stride);
          __m128 c = _mm_loadu_ps(y + 2 * w.stride), d = _mm_loadu_ps(y + 3 * w.stride);
          _MM_TRANSPOSE4_PS(a, b, c, d);
          float* to = packed + k * ROWS + i;
          _mm_storeu_ps(to, a), _mm_storeu_ps(to + ROWS, b);
          _mm_storeu_ps(to + 2 * ROWS, c), _mm_storeu_ps(to + 3 * ROWS, d);
        }
      for (long k = size / 4 * 4; k < size; k++)
        for (long i = 0; i < ROWS; i++) packed[k * ROWS + i] = x[i * w.stride + k];
      continue;
    }
    for (long k = 0; k < size; k++)
      for (long i = 0; i < ROWS; i++) packed[k * ROWS + i] = i < rows ? w.at(v + first + i, k) : 0.f;
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

// What a part of the vocabulary amounts to, a number a token each; null where that is not wanted
struct Sums {
  float *m, *rest, *t, *above, *zsum, *peaks;  // rest: the weights but those of the maximum, of which there are `peaks`
  const float* label;
};

// Adds `count` rows of logits of WIDTH tokens, `at` the first of them: Σe^(z-m), Σe^(z-m)·(z-m) and others
static void add(const float* logits, long count, const Sums& sums, long at) {
  const Vector one = all(1.f), before = load(sums.m + at);
  Vector m = before;
  for (long i = 0; i < count; i++) m = larger(m, load(logits + i * LANES));
  Vector rest = all(0.f), t = rest, peaks = rest, above = rest;
  const Vector label = sums.above ? load(sums.label + at) : rest;
  for (long i = 0; i < count; i++) {
    const Vector z = load(logits + i * LANES), d = z - m, w = exponential(d), peak = where_equal(z, m, one);
    rest = rest + (w - peak);
    peaks = peaks + peak;
    if (sums.t) t = fma(w, d, t);
    if (sums.above) above = above + where_greater(z, label, one);
  }
  const Vector step = before - m, grow = exponential(step), own = load(sums.rest + at), own_peaks = load(sums.peaks + at);
  const Vector same = where_equal(before, m, one);  // 0 where there is a new maximum: the one before is among the rest
  if (sums.t) store(sums.t + at, fma(grow, fma(own + own_peaks, step, load(sums.t + at)), t));
  store(sums.rest + at, fma(grow, fma(own_peaks, one - same, own), rest));
  store(sums.peaks + at, fma(own_peaks, same, peaks));
  store(sums.m + at, m);
  if (sums.above) store(sums.above + at, load(sums.above + at) + above);
}

// `hidden` (tokens, size) as panels [tokens / LANES][size][LANES], with 0 for tokens that there are not
static void pack_tokens(const float* hidden, long stride, long tokens, long size, float* packed) {
#pragma omp for
  for (long p = 0; p < (tokens + LANES - 1) / LANES; p++)
    for (long k = 0; k < size; k++)
      for (long j = 0, n = p * LANES; j < LANES; j++, n++)
        packed[(p * size + k) * LANES + j] = n < tokens ? hidden[n * stride + k] : 0.f;
}

// Some panels of tokens, from `first` to `last`, times the entries of one part of the vocabulary, added up
static void add_part(const Weight& w, long begin, long end, const float* tokens, long first, long last, long size,
                     const int64_t* labels, long n_tokens, const Sums& sums, float* entries, float* logits) {
  for (long v = begin; v < end; v += ENTRIES) {
    const long count = std::min(ENTRIES, end - v);
    pack_entries(w, v, count, size, entries);
    for (long p = first; p < last; p++) {
      std::memset(logits, 0, ENTRIES * LANES * sizeof(float));
      for (long k = 0; k < size; k += DEPTH)
        for (long i = 0; i < count; i += ROWS)
          for (long c = k; c < std::min(size, k + DEPTH); c += CHAIN)
            multiply(entries + i * size + c * ROWS, tokens + (p * size + c) * LANES,
                     std::min(CHAIN, size - c), logits + i * LANES);
      for (long j = 0; j < LANES; j += WIDTH) {
        const long at = p * LANES + j;
        if (sums.zsum) {
          Vector z = load(sums.zsum + at);
          for (long i = 0; i < count; i++) z = z + load(logits + i * LANES + j);
          store(sums.zsum + at, z);
        }
        if (labels)
          for (long n = at; n < std::min(at + WIDTH, n_tokens); n++)
            if (v <= labels[n] && labels[n] < v + count) logits[(labels[n] - v) * LANES + n - p * LANES] = MASK;
        add(logits + j, count, sums, at);
      }
    }
  }
}

static float* room(long numbers) {
  return static_cast<float*>(std::aligned_alloc(64, (numbers * sizeof(float) + 63) / 64 * 64));
}

extern "C" {
long lanes() { return LANES; }
long parts() { return PARTS; }
long entries() { return ENTRIES; }

// hidden (tokens, size), weight (vocab, size), both with numbers of a row side by side; labels and label_logit (tokens)
// or null; packed: room for the tokens; found: (5, PARTS, tokens rounded up to LANES), which gets m, rest, and where
// asked for t, above and zsum. Returns 0, or 1 where there is no memory.
int accumulate(const float* hidden, long hidden_stride, const void* weight, long weight_stride, int half, long tokens,
               long vocab, long size, const int64_t* labels, const float* label_logit, float* packed, float* found,
               int with_t, int with_above, int with_zsum, int threads) {
  const Weight w{weight, weight_stride, half != 0};
  const long panels = (tokens + LANES - 1) / LANES, width = panels * LANES, field = PARTS * width;
  const long part = ((vocab + PARTS - 1) / PARTS + ENTRIES - 1) / ENTRIES * ENTRIES;
  const long groups = std::min(panels, (threads + PARTS - 1) / PARTS), group = (panels + groups - 1) / groups;
  float* peaks = room(field + width);
  if (peaks == nullptr) return 1;
  float* label = peaks + field;
  for (long n = 0; n < width; n++) label[n] = label_logit && n < tokens ? label_logit[n] : 0.f;
  std::fill(found, found + field, EMPTY);
  std::fill(found + field, found + 5 * field, 0.f);
  std::fill(peaks, peaks + field, 0.f);
  int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    float* own = room(ENTRIES * (size + LANES));
    failed |= own == nullptr;
    pack_tokens(hidden, hidden_stride, tokens, size, packed);
#pragma omp for collapse(2) schedule(dynamic)
    for (long i = 0; i < PARTS; i++)
      for (long g = 0; g < groups; g++) {
        if (own == nullptr) continue;
        float* m = found + i * width;
        const Sums sums{m,
                        m + field,
                        with_t ? m + 2 * field : nullptr,
                        with_above ? m + 3 * field : nullptr,
                        with_zsum ? m + 4 * field : nullptr,
                        peaks + i * width,
                        label};
        add_part(w, i * part, std::min(vocab, (i + 1) * part), packed, g * group, std::min(panels, (g + 1) * group),
                 size, labels, tokens, sums, own + ENTRIES * LANES, own);
      }
    std::free(own);
  }
  for (long i = 0; i < field; i++)  // the maximum's own weight is known to be there
    if (peaks[i] > 0) found[field + i] += peaks[i] - 1;
  std::free(peaks);
  return failed;
}
}
