// Sums of products of bfloat16 by tiles of 16 rows (Intel's AMX): of pairs, as vectors multiply them, in another layout.
#pragma once
#include "vectors.h"

constexpr long TILE = 16;   // rows of a tile, and pairs of each
constexpr long BLOCK = 32;  // rows that are multiplied together, with as many tokens

#if defined(TILES)
constexpr bool MULTIPLIES_TILES = true;

// Registers of a thread, as long as this lives
struct TileRegisters {
  struct alignas(64) Shapes {
    uint8_t palette = 1, unused[15] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};
  };
  TileRegisters() {
    Shapes shapes;
    for (long i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = TILE;
    asm volatile("" ::"r"(&shapes) : "memory");  // the compiler takes what is loaded for its first 8 bytes
    _tile_loadconfig(&shapes);
  }
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() { _tile_release(); }
};

// sums[BLOCK][2·TILE] += rows[terms][BLOCK] times tokens[terms][2·TILE], or = where these are the first terms; rows as
// `pack_tiles` has them, the next TILE of them `panel` numbers on
static void multiply_tiles(const float* rows, long panel, const float* tokens, long terms, bool first, float* sums) {
  constexpr long line = 2 * TILE * sizeof(float);
  float* below = sums + 2 * TILE * TILE;
  asm volatile("" ::: "memory");  // the compiler does not know what memory the loads below read
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, line);
    _tile_loadd(1, sums + TILE, line);
    _tile_loadd(2, below, line);
    _tile_loadd(3, below + TILE, line);
  }
  for (long k = 0; k < terms; k += TILE) {
    _tile_stream_loadd(4, rows + k * TILE, 64);  // past the first cache, whose place the tokens need
    _tile_stream_loadd(5, rows + panel + k * TILE, 64);
    _tile_loadd(6, tokens + 2 * TILE * k, line);
    _tile_loadd(7, tokens + 2 * TILE * k + TILE, line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, line);
  _tile_stored(1, sums + TILE, line);
  _tile_stored(2, below, line);
  _tile_stored(3, below + TILE, line);
  asm volatile("" ::: "memory");
}
#else
#if defined(TILES_BY_VECTORS)
constexpr bool MULTIPLIES_TILES = true;
#else
constexpr bool MULTIPLIES_TILES = false;
#endif
struct TileRegisters {
  TileRegisters() {}  // without which compilers call it unused
};

static void multiply_tiles(const float* rows, long panel, const float* tokens, long terms, bool first, float* sums) {
  for (long i = 0; i < BLOCK; i++)
    for (long j = 0; j < 2 * TILE; j += WIDTH) {
      const float* row = rows + i / TILE * panel + i % TILE * TILE;
      Vector sum = first ? all(0.f) : load(sums + i * 2 * TILE + j);
      for (long k = 0; k < terms; k++)
        sum = fma_pairs(all(row[k / TILE * TILE * TILE + k % TILE]), load(tokens + 2 * TILE * k + j), sum);
      store(sums + i * 2 * TILE + j, sum);
    }
}
#endif
