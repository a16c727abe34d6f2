// What each token's logits add up to, as algebra/online_softmax.py defines it, with a tile of them more.
#pragma once
#include <cmath>

#include "products.h"

// EMPTY, MASK and FAR are those of algebra/online_softmax.py: see library.py

// A number a token each, as an `Accumulation` has them; null where that is not wanted. But for `rest`, which is Σw
// without all weights of the maximum, of which there are `peaks`, until `count_maximum`.
struct Sums {
  float *m, *rest, *peaks, *t, *r, *above, *zsum;
  float *m_ref, *s_ref, *near, *shift, *a, *b, *a_ref;  // null without a reference
};
constexpr long FIELDS = sizeof(Sums) / sizeof(float*);

// Sums `offset` numbers on
static Sums moved(Sums sums, long offset) {
  float* fields[FIELDS];
  std::memcpy(fields, &sums, sizeof sums);
  for (float*& field : fields)
    if (field) field += offset;
  std::memcpy(&sums, fields, sizeof sums);
  return sums;
}

// The sums of nothing
static void clear(const Sums& sums, long n) {
  float* fields[FIELDS];
  std::memcpy(fields, &sums, sizeof sums);
  for (float* field : fields)
    if (field) std::fill_n(field, n, field == sums.m || field == sums.m_ref || field == sums.near ? EMPTY : 0.f);
}

static void add_logits(const float* logits, long count, float* zsum) {
  Vector sum = load(zsum);
  for (long i = 0; i < count; i++) sum = sum + load(logits + i * LANES);
  store(zsum, sum);
}

// What brings sums before a tile to its maximum
struct Step {
  Vector step, grow, weights;  // m before - m; e^step; Σw before, relative to m before
};

// `moved_b` of algebra/online_softmax.py; s_ref, m_ref: those before the tile
static Vector moved_b(Vector b, const Step& policy, Vector m, Vector shift, Vector shift_step, Vector s_ref, Vector m_ref) {
  const Vector zero = all(0.f), back = smaller(all(FAR), larger(all(-FAR), zero - shift_step));
  const Vector near = policy.grow * fma(b, exponential(back), policy.weights * expm1(back));
  const Vector far = s_ref * exponential(smaller(all(150.f), (m_ref - m) + shift)) - policy.weights * policy.grow;
  Vector x = if_greater(all(FAR), absolute(shift_step), near, far);
  x = if_greater(policy.step, all(-FAR), x, far);
  return if_greater(b, policy.weights * all(-.5f), x, far);
}

// The sums of a KL with `count` rows of WIDTH tokens of both heads' logits, `m` the policy's new maxima; weights: as `add`'s
static void add_reference(const float* logits, const float* ref, long count, Vector m, const Step& policy, const Sums& sums, const Weights& weights) {
  const Vector zero = all(0.f), mask = all(MASK);
  const Vector m_ref_before = load(sums.m_ref), shift_before = load(sums.shift), s_ref_before = load(sums.s_ref);
  Vector m_ref = m_ref_before, near = load(sums.near), shift = shift_before;
  for (long i = 0; i < count; i++) {
    const Vector z = load(logits + i * LANES), y = load(ref + i * LANES), both = z + y;
    m_ref = larger(m_ref, y);
    shift = if_greater(both, near, z - y, shift);
    near = if_greater(both, near, both, near);
  }
  Vector s_ref = zero, a = zero, b = zero, a_ref = zero;
  for (long i = 0; i < count; i++) {
    const Vector z = load(logits + i * LANES), y = load(ref + i * LANES);
    const Vector w = exponential(larger(mask, z) - m), w_ref = exponential(larger(mask, y) - m_ref);
    const Vector gap = if_greater(larger(z, y), mask, y - z + shift, zero);  // 0 where both are masked
    const Vector behind = times(w, gap);
    s_ref = s_ref + w_ref;
    a = a - behind;
    b = fma(w, expm1(gap), b);
    if (sums.a_ref) a_ref = a_ref - times(w_ref, gap);
    if (weights.has(PD)) store(weights.second + i * LANES, weights.through(zero - behind, z));
    if (weights.has(Q)) store(weights.second + i * LANES, weights.through(w_ref, z));
  }
  const Vector grow_ref = exponential(m_ref_before - m_ref), shift_step = shift_before - shift;
  if (weights.has(PD)) weights.bring(policy.grow, shift_step);
  if (weights.has(Q)) weights.bring(grow_ref, zero);
  store(sums.a, times(policy.grow, fma(policy.weights, shift_step, load(sums.a))) + a);
  store(sums.b, moved_b(load(sums.b), policy, m, shift, shift_step, s_ref_before, m_ref_before) + b);
  if (sums.a_ref) store(sums.a_ref, times(grow_ref, fma(s_ref_before, shift_step, load(sums.a_ref))) + a_ref);
  store(sums.s_ref, fma(s_ref_before, grow_ref, s_ref));
  store(sums.m_ref, m_ref), store(sums.near, near), store(sums.shift, shift);
}

// Adds `count` rows of logits of WIDTH tokens to their sums; label: the logits above which entries are counted, or null;
// ref: the reference's logits, or null; weights: where those of products go, over both heads' logits, p null where there
// are none
static void add(const float* logits, const float* ref, long count, const float* label, const Sums& sums, const Weights& weights) {
  const Vector one = all(1.f), zero = all(0.f), mask = all(MASK), before = load(sums.m);
  Vector m = before;
  for (long i = 0; i < count; i++) m = larger(m, load(logits + i * LANES));
  const Vector step = before - m, own = load(sums.rest), own_peaks = load(sums.peaks);
  const Step policy{step, exponential(step), own + own_peaks};
  if (weights.p) {
    store(weights.grow, policy.grow);
    weights.bring(weights.has(P2) ? policy.grow * policy.grow : policy.grow, weights.has(PLOGP) ? step : zero);
  }
  if (ref) add_reference(logits, ref, count, m, policy, sums, weights);
  Vector rest = zero, t = zero, r = zero, peaks = zero, above = zero;
  const Vector least = label ? larger(mask, load(label)) : zero;
  for (long i = 0; i < count; i++) {
    const Vector z = larger(mask, load(logits + i * LANES)), d = z - m, w = exponential(d), peak = if_equal(z, m, one, zero);
    rest = rest + (w - peak);
    peaks = peaks + peak;
    if (sums.t) t = fma(w, d, t);
    if (sums.r) r = fma(w, w, r);
    if (label) above = above + if_greater(z, least, one, zero);
    if (weights.p) weigh(weights, i * LANES, z, w, d);
  }
  const Vector same = if_equal(before, m, one, zero);  // 0 where there is a new maximum: the one before is among the rest
  if (sums.t) store(sums.t, fma(policy.grow, fma(policy.weights, step, load(sums.t)), t));
  if (sums.r) store(sums.r, fma(policy.grow * policy.grow, load(sums.r), r));
  if (sums.above) store(sums.above, load(sums.above) + above);
  store(sums.rest, fma(policy.grow, fma(own_peaks, one - same, own), rest));
  store(sums.peaks, fma(own_peaks, same, peaks));
  store(sums.m, m);
}

// From Σw without the maximum's weights to Σw - 1: the maximum's own weight is known to be there. Where Σw is NaN
// a logit was, too, and so the maximum is, whose vectors may have passed it over.
static void count_maximum(const Sums& sums, long n) {
  for (long i = 0; i < n; i++) {
    if (sums.peaks[i] > 0) sums.rest[i] += sums.peaks[i] - 1;
    if (std::isnan(sums.rest[i]) && sums.m[i] < INFINITY) sums.m[i] = NAN;
  }
}
