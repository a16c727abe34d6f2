// Sums over a vocabulary of logits that no memory holds, on an x86 processor: docs/decisions/0051.
//
// A tile of logits is added to what each token has so far before the next one is made. Each token's numbers are added up
// in one order, whatever the number of threads.
#include <omp.h>

#include "backward.h"
#include "best.h"
#include "few.h"
#include "noise.h"
#include "sums.h"

// One call: logits of `head`, and of `ref` if that has factors, for the same tokens and entries
struct Call {
  Head head, ref;
  int64_t n_tokens, vocab;
  int64_t parts;          // of the vocabulary, each with sums of its own
  const int64_t* labels;  // a number a token, whose logit is left out of the sums; or null
  const float* label;     // a token's logit, above which entries are counted; room for all LANES; or null
  Sums sums;              // [parts][tokens rounded up to LANES] each
  Products products;      // of `head`, [parts][panels] each; of no call whose logits are kept
  Best best;              // of the first thread; those of others lie behind. k is 0 where none are wanted
  float *kept, *ref_kept;  // [vocab][tokens], which get both heads' logits, MASK for what the sums leave out; or null
  float* best_logits;     // [tokens][k]
  int64_t* best_entries;  // [tokens][k]
};

// A thread's rows of both heads, packed, and a tile of logits of each; for products the rows packed the other way round,
// and what moves those before
struct Own {
  long size, ref_size, rows;
  Room room;
  float *logits = room.memory, *ref_logits = logits + ENTRIES * LANES;
  float *entries = ref_logits + ENTRIES * LANES, *ref_entries = entries + ENTRIES * size;
  float *moves = ref_entries + ENTRIES * ref_size, *transposed = moves + 3 * LANES;
  Waiting waiting;  // in the place of `transposed`
  Own(long size, long ref_size, const Products& products, long panels)
      : size(size), ref_size(ref_size), rows(products.rows()),
        room(ENTRIES * (2 * LANES + size + ref_size) + 3 * LANES + products.room(panels)), waiting(transposed, rows, panels) {}
};

// The best of `count` entries from v on of WIDTH tokens from `first` on, of which there are `tokens`
static void find_best(const float* logits, long v, long count, long first, long tokens, Best& best) {
  const uint32_t there = (uint32_t(1) << tokens) - 1;
  Vector least = load(best.least + first);
  for (long i = 0; i < count; i++) {
    uint32_t better = not_at_most(load(logits + i * LANES), least) & there;
    if (!better) continue;
    for (; better; better &= better - 1) {
      const long j = __builtin_ctz(better);
      best.add(first + j, logits[i * LANES + j], v + i);
    }
    least = load(best.least + first);
  }
}

// Logits of `count` entries and WIDTH tokens, of which there are `tokens`, to where those of all n_tokens lie
static void keep(const float* logits, long count, long tokens, long n_tokens, float* kept) {
  const Vector mask = all(MASK);
  const bool whole = tokens == WIDTH && n_tokens % WIDTH == 0;  // vectors, which nobody reads before all are there
  for (long i = 0; i < count; i++, logits += LANES, kept += n_tokens) {
    alignas(64) float z[WIDTH];
    const Vector masked = larger(mask, load(logits));
    if (whole) {
      store_for_later(kept, masked);
    } else {
      store(z, masked);
      std::copy_n(z, tokens, kept);
    }
  }
}

// Adds the tiles of one panel of tokens and `count` entries from v on, in a part of the vocabulary; block: which of those
// whose weights wait
static void add_tiles(const Call& call, const Own& own, long v, long count, long panel, const Sums& sums, const Products& products, Best& best, long block) {
  float* ref = call.ref.n_factors ? own.ref_logits : nullptr;
  Weights weights{};
  if (own.rows) {  // over the logits, which have been read by then
    weights = {own.logits, products.second ? own.ref_logits : nullptr, products.basis};
    weights.grow = products.waits() ? own.waiting.grow(panel, block) : own.moves;
    if (products.waits()) std::fill_n(weights.grow, LANES, 1.f);  // of lanes without a token, too
    weights.scale = own.moves + LANES, weights.shift = own.moves + 2 * LANES;
    if (call.head.outer) weights.outer = call.head.outer + panel * LANES;
  }
  make_logits(call.head, own.size, own.entries, count, panel, own.logits);
  if (ref) make_logits(call.ref, own.ref_size, own.ref_entries, count, panel, ref);
  for (long j = 0; j < LANES && panel * LANES + j < call.n_tokens; j += WIDTH) {
    const long first = panel * LANES + j, tokens = std::min(WIDTH, call.n_tokens - first);
    const Sums here = moved(sums, first);
    if (here.zsum) add_logits(own.logits + j, count, here.zsum);
    if (best.k) find_best(own.logits + j, v, count, first, tokens, best);
    if (call.labels)
      for (long n = first; n < first + tokens; n++)
        if (v <= call.labels[n] && call.labels[n] < v + count) {
          const long at = (call.labels[n] - v) * LANES + n - panel * LANES;
          own.logits[at] = MASK;
          if (ref) ref[at] = MASK;
        }
    if (call.kept) keep(own.logits + j, count, tokens, call.n_tokens, call.kept + v * call.n_tokens + first);
    if (call.ref_kept) keep(ref + j, count, tokens, call.n_tokens, call.ref_kept + v * call.n_tokens + first);
    add(own.logits + j, ref ? ref + j : nullptr, count, call.label ? call.label + first : nullptr, here, weights.of(j));
  }
  if (!own.rows) return;
  if (products.waits()) {
    pair_weights(count, weights.p, own.waiting.weights(panel, block));
    return;
  }
  const long at = panel * own.rows * LANES;
  float *p = products.p + at, *second = products.second ? products.second + at : nullptr;
  move_products(weights, own.rows, p, second);
  add_products(own.transposed, weights.p, count, products.pairs, own.rows, p);
  if (second) add_products(own.transposed, weights.second, count, false, own.rows, second);
}

extern "C" {
long lanes() { return LANES; }
long parts() { return PARTS; }
long entries() { return ENTRIES; }
long rows(int pairs) { return Products{.pairs = pairs}.together(); }
long room(long width, int pairs, long n_tokens) {
  return Products{.width = width, .pairs = pairs}.room((n_tokens + LANES - 1) / LANES);
}
long pairs_of(long size) { return pairs_of_row(size); }
int multiplies_pairs() { return MULTIPLIES_PAIRS; }
int multiplies_tiles() { return MULTIPLIES_PAIRS && MULTIPLIES_TILES; }

// Each of these returns 0, or 1 where there is no memory.
int multiply_entries(const OfEntries* call, int threads) { return multiply_for_entries(*call, threads); }
int multiply_tokens(const OfTokens* call, int threads) { return multiply_for_tokens(*call, threads); }
int multiply_few(const OfFew* call, int threads) { return multiply_for_few(*call, threads); }

int search(const Search* call, int threads) {
  search_words(*call, threads);
  return 0;
}

int accumulate(const Call* given, int threads) {
  const Call& call = *given;
  const bool waits = call.products.waits();
  const Tasks tasks(call.n_tokens, call.vocab, call.parts, threads, waits ? MOST_PANELS : 0);
  const long parts = call.parts, width = tasks.panels * LANES, rows = call.products.rows();
  const long together = call.head.pairs() && (!rows || call.products.pairs) ? ENTRIES : FP32_ENTRIES;
  int failed = 0;
  clear(call.sums, parts * width);
  for (float* sums : {call.products.p, call.products.second})
    if (sums) std::fill_n(sums, parts * width * rows, 0.f);
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    const TileRegisters registers;
    const Own own{call.head.size(), call.ref.size(), call.products, tasks.group};
    failed |= own.room.memory == nullptr;
    Best best = call.best;
    if (best.k) best = best.of_thread(omp_get_thread_num(), width);
    pack_tokens(call.head, own.size, call.n_tokens);
    pack_tokens(call.ref, own.ref_size, call.n_tokens);
#pragma omp for collapse(2) schedule(monotonic : dynamic)
    for (long i = 0; i < parts; i++)
      for (long g = 0; g < tasks.groups; g++) {
        if (own.room.memory == nullptr) continue;
        const Sums sums = moved(call.sums, i * width);
        const Products products = call.products.of(i * width * rows);
        const long end = std::min(call.vocab, (i + 1) * tasks.part);
        const long first = g * tasks.group, last = std::min(tasks.panels, first + tasks.group);
        for (long v = i * tasks.part; v < end; v += BLOCKS * together) {
          const long stop = std::min(end, v + BLOCKS * together);
          for (long at = v; at < stop; at += together) {
            const long count = std::min(together, stop - at);
            pack_entries(call.head, own.size, at, count, own.entries);
            pack_entries(call.ref, own.ref_size, at, count, own.ref_entries);
            if (!waits) pack_for(call.products, call.head, at, count, own.transposed);
            for (long p = first; p < last; p++) add_tiles(call, own, at, count, p, sums, products, best, (at - v) / together);
          }
          if (waits) add_waiting(own.waiting, call.head.factors[0], v, stop, last - first, rows, true, products.p + first * rows * LANES);
        }
      }
    _mm_sfence();  // what was stored past the caches is there for all threads
    if (best.k)
#pragma omp for
      for (long n = 0; n < call.n_tokens; n++)
        call.best.of_all(omp_get_num_threads(), width, n, call.best_logits + n * best.k, call.best_entries + n * best.k);
  }
  count_maximum(call.sums, parts * width);
  return failed;
}
}
