// Packs rows of numbers into the panels that a product reads: floats, or pairs of bfloat16 in the place of floats.
#pragma once
#include <algorithm>
#include <cstring>

#include "tiles.h"

#if defined(__AVX512F__)
constexpr long ROWS = 12, VECTORS = 2;  // as many sums as there are registers for
#else
constexpr long ROWS = 4, VECTORS = 3;
#endif
constexpr long LANES = WIDTH * VECTORS;
constexpr long FP32_ENTRIES = 96;  // whose packed rows stay in a core's second cache
constexpr long ENTRIES = MULTIPLIES_TILES ? 2 * FP32_ENTRIES : FP32_ENTRIES;  // of tiles, and the most that there is room for
constexpr long TOGETHER = 4;  // rows, or pairs of them, whose parts of a panel are packed at once: whole lines of memory, and few at one place
                              // of the first cache where rows lie a power of two apart
static_assert(!MULTIPLIES_TILES || (LANES == 2 * TILE && FP32_ENTRIES % BLOCK == 0));

static inline float widened(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Of a float that has no more digits
static inline uint16_t narrowed(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits >> 16;
}

static inline float pair_of(uint16_t first, uint16_t second) {
  const uint16_t both[2] = {first, second};
  float pair;
  std::memcpy(&pair, both, sizeof pair);
  return pair;
}

// Rows of a matrix, the first of which is number v: four(i, k) are four numbers of row i from k on, one(i, k) is one
template <class Number>
struct Matrix {
  const Number* x;
  long stride, size;
  Matrix(const void* x, long v, long stride, long size)
      : x(static_cast<const Number*>(x) + v * stride), stride(stride), size(size) {}
  const Number* at(long i, long k) const { return x + i * stride + k; }
};

struct Floats : Matrix<float> {
  using Matrix::Matrix;
  static constexpr long together = 1;
  __m128 four(long i, long k) const {
    if (k % 16 == 0) __builtin_prefetch(at(i + ROWS, k));  // a line of memory of a later row
    return _mm_loadu_ps(at(i, k));
  }
  float one(long i, long k) const { return *at(i, k); }
};

// bfloat16 that become floats
struct Widened : Matrix<uint16_t> {
  using Matrix::Matrix;
  static constexpr long together = 1;
  __m128 four(long i, long k) const {
    const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(i, k)));
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16));
  }
  float one(long i, long k) const { return widened(*at(i, k)); }
};

// bfloat16 as they are: a number is a pair
struct Pairs : Matrix<uint16_t> {
  using Matrix::Matrix;
  static constexpr long together = 2;
  __m128 four(long i, long k) const {
    if (k % 16 == 0) __builtin_prefetch(at(i + ROWS, 2 * k));
    return _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at(i, 2 * k))));
  }
  float one(long i, long k) const { return pair_of(*at(i, 2 * k), 2 * k + 1 < size ? *at(i, 2 * k + 1) : 0); }
};

// bfloat16 of two rows in turn: a number is one of each, in a pair, or 0 of a row behind the last of `count`
struct PairsOfRows : Matrix<uint16_t> {
  const long count;
  PairsOfRows(const void* x, long v, long stride, long size, long count) : Matrix(x, v, stride, size), count(count) {}
  static constexpr long together = 1;
  __m128 four(long i, long k) const {
    const uint16_t *first = at(2 * i, k), *second = first + stride;
    if (k % 32 == 0) __builtin_prefetch(first + 2 * TOGETHER * stride), __builtin_prefetch(second + 2 * TOGETHER * stride);
    const __m128i none = _mm_setzero_si128(), a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(first));
    const __m128i b = 2 * i + 1 < count ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second)) : none;
    return _mm_castsi128_ps(_mm_unpacklo_epi16(a, b));
  }
  float one(long i, long k) const { return pair_of(*at(2 * i, k), 2 * i + 1 < count ? *at(2 * i + 1, k) : 0); }
};

// Floats that are rounded to pairs, each times what `scale` has for its column where that is given
struct Rounded : Matrix<float> {
  const float* scale;
  Rounded(const float* x, long v, long stride, long size, const float* scale) : Matrix(x, v, stride, size), scale(scale) {}
  static constexpr long together = 2;
  __m128 four(long i, long k) const {
    const __m256 some = _mm256_loadu_ps(at(i, 2 * k));
    return round_to_pairs(scale ? some * _mm256_loadu_ps(scale + 2 * k) : some);
  }
  float one(long i, long k) const {
    float two[2] = {};
    for (long j = 0; j < 2 && 2 * k + j < size; j++) two[j] = *at(i, 2 * k + j) * (scale ? scale[2 * k + j] : 1.f);
    return rounded_pair(two[0], two[1]);
  }
};

// `count` rows as panel[k][row] of panels of ROWS that lie `stride` apart; rows up to a whole panel are 0
template <class Numbers>
static void pack_panels(const Numbers& of, long count, long stride, float* packed) {
  const long length = (of.size + of.together - 1) / of.together, whole = of.size / of.together / 4 * 4;
  for (long first = 0; first < count; first += ROWS, packed += stride) {
    const long rows = std::min(ROWS, count - first), fours = rows == ROWS ? whole : 0;
    for (long k = 0; k < fours; k += 4)
      for (long i = 0; i < ROWS; i += 4) {
        const long row = first + i;
        __m128 a = of.four(row, k), b = of.four(row + 1, k), c = of.four(row + 2, k), d = of.four(row + 3, k);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        float* to = packed + k * ROWS + i;
        _mm_storeu_ps(to, a), _mm_storeu_ps(to + ROWS, b);
        _mm_storeu_ps(to + 2 * ROWS, c), _mm_storeu_ps(to + 3 * ROWS, d);
      }
    for (long k = fours; k < length; k++)
      for (long i = 0; i < ROWS; i++) packed[k * ROWS + i] = i < rows ? of.one(first + i, k) : 0.f;
  }
}

// `count` rows as panel[row][column] of panels of ROWS columns, with room for ENTRIES rows, from column `first` on
template <class Numbers>
static void pack_columns(const Numbers& of, long count, long first, float* packed) {
  for (long start = 0; start < count; start += TOGETHER) {
    const long end = std::min(count, start + TOGETHER);
    long k = 0;
    const auto one_by_one = [&](long stop) {
      for (; k < stop; k++)
        for (long i = start; i < end; i++) packed[((first + k) / ROWS * ENTRIES + i) * ROWS + (first + k) % ROWS] = of.one(i, k);
    };
    if (end == start + TOGETHER) {
      one_by_one(std::min(of.size, (ROWS - first % ROWS) % ROWS));
      float* to = packed + ((first + k) / ROWS * ENTRIES + start) * ROWS;
      for (; k + ROWS <= of.size; k += ROWS, to += ENTRIES * ROWS)
#pragma GCC unroll 4
        for (long i = 0; i < TOGETHER; i++)
#pragma GCC unroll 4
          for (long j = 0; j < ROWS; j += 4) _mm_storeu_ps(to + i * ROWS + j, of.four(start + i, k + j));
    }
    one_by_one(of.size);
  }
}

// `count` rows of pairs as panels [length / TILE][TILE rows][TILE pairs], with 0 behind a row's end and for rows up to a
// whole block
template <class Numbers>
static void pack_tiles(const Numbers& of, long count, long length, float* packed) {
  const long pairs = (of.size + 1) / 2, whole = of.size / (2 * TILE) * TILE;
  for (long row = 0; row < (count + BLOCK - 1) / BLOCK * BLOCK; row++) {
    float* to = packed + row / TILE * TILE * length + row % TILE * TILE;
    long k = 0;
    for (; k < (row < count ? whole : 0); k += TILE, to += TILE * TILE)
      for (long j = 0; j < TILE; j += 4) _mm_storeu_ps(to + j, of.four(row, k + j));
    for (; k < length; k += TILE, to += TILE * TILE)
      for (long j = 0; j < TILE; j++) to[j] = row < count && k + j < pairs ? of.one(row, k + j) : 0.f;
  }
}
