// Vectors of fp32, and of words, as AVX-512 and AVX2 have them, and functions of them that both compute alike.
#pragma once
#include <immintrin.h>

#include <cstdint>

#if defined(__AVX512F__)
using Vector = __m512;
constexpr long WIDTH = 16;
static inline Vector load(const float* x) { return _mm512_load_ps(x); }
static inline void store(float* x, Vector v) { _mm512_store_ps(x, v); }
static inline void store_for_later(float* x, Vector v) { _mm512_stream_ps(x, v); }  // past the caches
static inline Vector load_anywhere(const float* x) { return _mm512_loadu_ps(x); }
static inline Vector load_widened(const uint16_t* x) {  // of bfloat16
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
static inline void store_anywhere(float* x, Vector v) { _mm512_storeu_ps(x, v); }
static inline Vector all(float x) { return _mm512_set1_ps(x); }
static inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }  // b where one is NaN
static inline Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
static inline Vector nearest(Vector x) { return _mm512_roundscale_ps(x, 8); }
static inline Vector times_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }  // x·2^n
static inline Vector if_equal(Vector a, Vector b, Vector x, Vector y) {  // a == b ? x : y
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), x);
}
static inline Vector if_greater(Vector a, Vector b, Vector x, Vector y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x);
}
static inline float added_up(Vector x) { return _mm512_reduce_add_ps(x); }
static inline uint32_t not_at_most(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }

// Words of 32 bits, in the lower halves of lanes of 64; nobody reads what is above them
using Words = __m512i;
static inline Words load_words(const int64_t* x) { return _mm512_loadu_si512(x); }
static inline Words all_words(int64_t x) { return _mm512_set1_epi64(x); }
static inline Words product(Words a, Words b) { return _mm512_mul_epu32(a, b); }  // all 64 bits
static inline Words upper(Words a) { return _mm512_srli_epi64(a, 32); }
static inline Words larger_words(Words a, Words b) { return _mm512_max_epu32(a, b); }
static inline uint32_t words_at_least(Words a, Words b) {  // b of any 64 bits
  return _mm512_cmpge_epi64_mask(a & all_words(UINT32_MAX), b);
}
#else
using Vector = __m256;
constexpr long WIDTH = 8;
static inline Vector load(const float* x) { return _mm256_load_ps(x); }
static inline void store(float* x, Vector v) { _mm256_store_ps(x, v); }
static inline void store_for_later(float* x, Vector v) { store(x, v); }  // half a line would go to memory by itself
static inline Vector load_anywhere(const float* x) { return _mm256_loadu_ps(x); }
static inline Vector load_widened(const uint16_t* x) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
static inline void store_anywhere(float* x, Vector v) { _mm256_storeu_ps(x, v); }
static inline Vector all(float x) { return _mm256_set1_ps(x); }
static inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
static inline Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }
static inline Vector nearest(Vector x) { return _mm256_round_ps(x, 8); }
static inline Vector power(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
static inline Vector times_power(Vector x, Vector n) {  // in two steps, so that what is too small is 0
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  return x * power(half) * power(_mm256_sub_epi32(whole, half));
}
static inline Vector if_equal(Vector a, Vector b, Vector x, Vector y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
static inline Vector if_greater(Vector a, Vector b, Vector x, Vector y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
static inline float added_up(Vector x) {
  const __m128 fours = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehdup_ps(twos)));
}
static inline uint32_t not_at_most(Vector a, Vector b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)); }

using Words = __m256i;
static inline Words load_words(const int64_t* x) { return _mm256_loadu_si256(reinterpret_cast<const Words*>(x)); }
static inline Words all_words(int64_t x) { return _mm256_set1_epi64x(x); }
static inline Words product(Words a, Words b) { return _mm256_mul_epu32(a, b); }
static inline Words upper(Words a) { return _mm256_srli_epi64(a, 32); }
static inline Words larger_words(Words a, Words b) { return _mm256_max_epu32(a, b); }
static inline uint32_t words_at_least(Words a, Words b) {
  return 15 & ~_mm256_movemask_pd((__m256d)_mm256_cmpgt_epi64(b, a & all_words(UINT32_MAX)));
}
#endif
constexpr long WORDS = WIDTH / 2;

// Pairs of bfloat16, each in the place of a float. A processor that does not multiply them never calls these.
#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_PAIRS = true;
static inline Vector fma_pairs(Vector a, Vector b, Vector sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
static inline __m128 round_to_pairs(__m256 x) { return (__m128)_mm256_cvtneps_pbh(x); }  // of neighbours
static inline float rounded_pair(float first, float second) {
  return _mm_cvtss_f32((__m128)_mm_cvtneps_pbh(_mm_set_ps(0.f, 0.f, second, first)));
}
static inline __m512i rounded_halves(Vector x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }
static inline Vector pairs_of(Vector first, Vector second) {  // one of each
  return _mm512_castsi512_ps(_mm512_or_si512(rounded_halves(first), _mm512_slli_epi32(rounded_halves(second), 16)));
}
#else
constexpr bool MULTIPLIES_PAIRS = false;
static inline Vector fma_pairs(Vector, Vector, Vector sum) { return sum; }
static inline __m128 round_to_pairs(__m256 x) { return _mm256_castps256_ps128(x); }
static inline float rounded_pair(float first, float) { return first; }
static inline Vector pairs_of(Vector first, Vector) { return first; }
#endif

// x = n·log 2 + r with a whole n; e^r - 1
static inline Vector expm1_of_rest(Vector x, Vector& n) {
  n = nearest(x * all(1.44269504088896341f));
  Vector r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Vector p = fma(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  return fma(p, r * r, r);
}

// e^x for x below 150, to the last digit or two; 0 below -104; NaN stays
static inline Vector exponential(Vector x) {
  Vector n;
  const Vector y = expm1_of_rest(larger(all(-150.f), x), n);
  return times_power(y + all(1.f), n);
}

// e^x - 1, which keeps its digits near 0; infinite or NaN above 88
static inline Vector expm1(Vector x) {
  Vector n;
  const Vector y = expm1_of_rest(smaller(all(150.f), larger(all(-150.f), x)), n), one = all(1.f);
  return fma(times_power(one, n), y, times_power(one, n) - one);
}

// 0·x is 0, also of an infinite x
static inline Vector times(Vector factor, Vector x) { return if_equal(factor, all(0.f), factor, factor * x); }

static inline Vector absolute(Vector x) { return larger(x, all(0.f) - x); }

static inline Vector tanh(Vector x) {
  const Vector y = expm1(absolute(x) * all(-2.f)), z = y / (y + all(2.f));  // -tanh|x|
  return if_greater(x, all(0.f), all(0.f) - z, z);
}
