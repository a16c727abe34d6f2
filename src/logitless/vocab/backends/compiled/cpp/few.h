// A head's product with a few tokens, whose logits memory holds: by tiles, or by the rows as they lie.
#pragma once
#include "room.h"

struct OfFew {
  Head head;                // of one factor
  int64_t n_tokens, vocab;  // tokens: LANES at most
  float* out;               // a number for each token and entry, those of a token and of an entry so far apart
  int64_t token_stride, entry_stride;
  float* at(long n, long v) const { return out + n * token_stride + v * entry_stride; }
};

static int multiply_few_by_tiles(const OfFew& call, int threads) {
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
        for (long i = 0; i < count; i++) *call.at(n, v + i) = tile[i * LANES + n];
    }
  }
  return failed;
}

constexpr long ROWS_TOGETHER = WIDTH == 16 ? 6 : 3, TOKENS_TOGETHER = 4;  // whose sums there are registers for

// What a vector has of a row and of a token, `numbers` of each, and their product added to a sum: floats, rows of
// bfloat16 that become floats, or pairs of bfloat16
struct FloatRows {
  using Entry = float;
  using Token = float;
  static constexpr long numbers = WIDTH;
  static Vector entry(const float* x) { return load_anywhere(x); }
  static Vector token(const float* x) { return load_anywhere(x); }
  static Vector add(Vector w, Vector x, Vector sum) { return fma(w, x, sum); }
};

struct WidenedRows : FloatRows {
  using Entry = uint16_t;
  static Vector entry(const uint16_t* x) { return load_widened(x); }
};

struct PairRows {
  using Entry = uint16_t;
  using Token = uint16_t;
  static constexpr long numbers = 2 * WIDTH;
  static Vector entry(const uint16_t* x) { return load_anywhere(reinterpret_cast<const float*>(x)); }
  static Vector token(const uint16_t* x) { return entry(x); }
  static Vector add(Vector w, Vector x, Vector sum) { return fma_pairs(w, x, sum); }
};

// The last numbers of a row, and zeros
template <long numbers, class Number>
struct Rest {
  alignas(64) Number x[numbers] = {};
  Rest(const Number* from, long count) { std::copy_n(from, count, x); }
};

// logits[ROWS_TOGETHER][tokens] of rows and tokens that have `size` numbers each; the next rows, `next` numbers on, are
// brought to the caches meanwhile
template <class Kind, long tokens>
static void multiply_rows(
    const typename Kind::Entry* const* rows, long next, const typename Kind::Token* of, long stride, long size,
    float (*logits)[TOKENS_TOGETHER]) {
  Vector sum[ROWS_TOGETHER][tokens];
#pragma GCC unroll 8
  for (long i = 0; i < ROWS_TOGETHER; i++)
#pragma GCC unroll 8
    for (long j = 0; j < tokens; j++) sum[i][j] = all(0.f);
  long k = 0;
  const auto add = [&](const auto& entry, const auto& token) {
    Vector x[tokens];
#pragma GCC unroll 8
    for (long j = 0; j < tokens; j++) x[j] = token(of + j * stride);
#pragma GCC unroll 8
    for (long i = 0; i < ROWS_TOGETHER; i++) {
      const Vector w = entry(rows[i]);
      __builtin_prefetch(rows[i] + next + k);
#pragma GCC unroll 8
      for (long j = 0; j < tokens; j++) sum[i][j] = Kind::add(w, x[j], sum[i][j]);
    }
  };
  constexpr long numbers = Kind::numbers;
  for (; k + numbers <= size; k += numbers)
    add([k](const auto* x) { return Kind::entry(x + k); }, [k](const auto* x) { return Kind::token(x + k); });
  if (k < size)
    add([k, size](const auto* x) { return Kind::entry(Rest<numbers, typename Kind::Entry>(x + k, size - k).x); },
        [k, size](const auto* x) { return Kind::token(Rest<numbers, typename Kind::Token>(x + k, size - k).x); });
#pragma GCC unroll 8
  for (long i = 0; i < ROWS_TOGETHER; i++)
#pragma GCC unroll 8
    for (long j = 0; j < tokens; j++) logits[i][j] = added_up(sum[i][j]);
}

// All tokens, which lie `stride` apart, by the head's rows as they lie
template <class Kind>
static void multiply_by_rows(const OfFew& call, const typename Kind::Token* tokens, long stride) {
  const Factor& w = call.head.factors[0];
  const auto* entries = static_cast<const typename Kind::Entry*>(w.entries);
  const long next = ROWS_TOGETHER * w.entries_stride;
#pragma omp for schedule(monotonic : dynamic)
  for (long block = 0; block < call.vocab; block += ENTRIES)
    for (long v = block; v < std::min(call.vocab, block + ENTRIES); v += ROWS_TOGETHER) {
      const long count = std::min(ROWS_TOGETHER, call.vocab - v);
      const typename Kind::Entry* rows[ROWS_TOGETHER];  // the last one again, where there are no more
      for (long i = 0; i < ROWS_TOGETHER; i++) rows[i] = entries + (v + std::min(i, count - 1)) * w.entries_stride;
      for (long n = 0; n < call.n_tokens; n += TOKENS_TOGETHER) {
        const long some = std::min(TOKENS_TOGETHER, call.n_tokens - n);
        const auto* of = tokens + n * stride;
        float logits[ROWS_TOGETHER][TOKENS_TOGETHER];
        if (some == 4) multiply_rows<Kind, 4>(rows, next, of, stride, w.size, logits);
        else if (some == 3) multiply_rows<Kind, 3>(rows, next, of, stride, w.size, logits);
        else if (some == 2) multiply_rows<Kind, 2>(rows, next, of, stride, w.size, logits);
        else multiply_rows<Kind, 1>(rows, next, of, stride, w.size, logits);
        for (long j = 0; j < some; j++)
          for (long i = 0; i < count; i++) *call.at(n + j, v + i) = logits[i][j];
      }
    }
}

static int multiply_few_by_rows(const OfFew& call, int threads) {
  const Factor& w = call.head.factors[0];
  auto* packed = reinterpret_cast<uint16_t*>(call.head.packed);
#pragma omp parallel num_threads(threads)
  if (w.pairs) {
#pragma omp for
    for (long n = 0; n < call.n_tokens; n++)
      for (long k = 0; k < w.size; k++) packed[n * w.size + k] = narrowed(w.tokens[n * w.tokens_stride + k]);
    multiply_by_rows<PairRows>(call, packed, w.size);
  } else if (w.half) {
    multiply_by_rows<WidenedRows>(call, w.tokens, w.tokens_stride);
  } else {
    multiply_by_rows<FloatRows>(call, w.tokens, w.tokens_stride);
  }
  return 0;
}

static int multiply_for_few(const OfFew& call, int threads) {
  const bool tiles = MULTIPLIES_TILES && call.head.pairs();
  return tiles ? multiply_few_by_tiles(call, threads) : multiply_few_by_rows(call, threads);
}
