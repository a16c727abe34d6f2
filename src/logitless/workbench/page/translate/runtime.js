// Python's meaning of its operators, for translated formulas. Whole numbers are BigInt: exact at any size. Whatever a
// helper does not know throws, so that a page never shows a number that Python would not have computed.
class Raised extends Error {
  constructor(kind, message) { super(message); this.name = kind; }
}
const $py = (() => {
  const fail = (what, ...values) => { throw new TypeError(`${what} of ${values.map((v) => typeof v).join(", ")}`); };
  const number = (x) => typeof x === "bigint" || typeof x === "boolean";
  const int = (x) => (typeof x === "bigint" ? x : x === true ? 1n : x === false ? 0n : fail("int", x));
  const text = (x) => (typeof x === "string" ? x : fail("text", x));
  const iter = (x) => (x instanceof Map ? x.keys()
    : x !== null && x !== undefined && typeof x !== "string" && x[Symbol.iterator] ? x : fail("iteration", x));
  const list = (x) => [...iter(x)];
  const position = (i, length) => { const k = Number(int(i)); return k < 0 ? k + length : k; };

  const eq = (a, b) => {
    if (a === undefined || b === undefined) fail("equality", a, b);
    if (number(a) && number(b)) return int(a) === int(b);
    if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((v, i) => eq(v, b[i]));
    if (a instanceof Set && b instanceof Set) return a.size === b.size && subset(a, b);
    if ([a, b].some((v) => v !== null && typeof v === "object" && !Array.isArray(v) && !(v instanceof Set)))
      fail("equality", a, b);
    return a === b;
  };
  const subset = (a, b) => list(a).every((v) => b.has(v));
  const less = (a, b) => (number(a) && number(b) ? int(a) < int(b) : text(a) < text(b));
  const le = (a, b) => (a instanceof Set && b instanceof Set ? subset(a, b) : !less(b, a));
  const truth = (x) => {
    if (typeof x === "boolean") return x;
    if (typeof x === "bigint") return x !== 0n;
    if (typeof x === "string") return x !== "";
    if (x === null) return false;
    if (Array.isArray(x)) return x.length > 0;
    if (x instanceof Set || x instanceof Map) return x.size > 0;
    if (x?.constructor?.fields) return true; // a record
    return fail("truth", x);
  };
  const floordiv = (a, b) => {
    const [x, y] = [int(a), int(b)];
    const q = x / y; // a RangeError for zero; towards zero otherwise
    return x % y !== 0n && x < 0n !== y < 0n ? q - 1n : q;
  };
  const in_ = (x, box) => {
    if (typeof box === "string") return box.includes(text(x));
    if (box instanceof Set || box instanceof Map) return box.has(x);
    return list(box).some((v) => eq(x, v));
  };
  const best = (better) => (key, ...args) => {
    const values = args.length === 1 ? list(args[0]) : args;
    if (!values.length) fail("the best of nothing");
    const rank = key ?? ((v) => v);
    return values.reduce((a, b) => (better(rank(b), rank(a)) ? b : a));
  };
  const str = (x) => (typeof x === "string" ? x : typeof x === "bigint" ? `${x}`
    : x === true ? "True" : x === false ? "False" : fail("text", x));
  const attr = (x, name) => (name in x ? x[name] : fail(`attribute ${name}`, x));

  return {
    iter, list, eq, le, truth, floordiv, in_, int, str, tuple: list,
    add: (a, b) => (typeof a === "string" ? a + text(b) : Array.isArray(a) ? [...a, ...list(b)] : int(a) + int(b)),
    sub: (a, b) => int(a) - int(b),
    mul: (a, b) => int(a) * int(b),
    mod: (a, b) => int(a) - floordiv(a, b) * int(b),
    lshift: (a, b) => int(a) << int(b),
    rshift: (a, b) => int(a) >> int(b),
    neg: (a) => -int(a),
    ne: (a, b) => !eq(a, b),
    lt: less,
    gt: (a, b) => less(b, a),
    ge: (a, b) => le(b, a),
    not_in: (x, box) => !in_(x, box),
    is_none: (x) => (x === undefined ? fail("identity", x) : x === null),
    and: (a, b) => (truth(a) ? b() : a),
    or: (a, b) => (truth(a) ? a : b()),
    abs: (x) => (int(x) < 0n ? -int(x) : int(x)),
    all: (x) => list(x).every(truth),
    any: (x) => list(x).some(truth),
    bool: truth,
    len: (x) => BigInt(typeof x === "string" ? [...x].length : list(x).length),
    max: best((a, b) => less(b, a)),
    min: best(less),
    sum: (x) => list(x).reduce((a, b) => a + int(b), 0n),
    sorted: (x) => list(x).sort((a, b) => (less(a, b) ? -1 : less(b, a) ? 1 : 0)),
    set: (x) => new Set(x === undefined ? [] : iter(x)),
    frozenset: (x) => new Set(x === undefined ? [] : iter(x)),
    next: (x) => { for (const v of iter(x)) return v; return fail("the next of nothing"); },
    zip: (strict, ...lists) => {
      const all = lists.map(list), sizes = all.map((v) => v.length);
      if (strict && new Set(sizes).size > 1) fail("lists of different lengths");
      return Array.from({ length: Math.min(...sizes) }, (_, i) => all.map((v) => v[i]));
    },
    getattr: attr,
    item: (box, key) => {
      if (box instanceof Map) return box.has(key) ? box.get(key) : fail(`key ${String(key)}`, box);
      const i = Array.isArray(box) ? position(key, box.length) : fail("item", box);
      return i >= 0 && i < box.length ? box[i] : fail(`item ${i}`, box);
    },
    slice: (box, from, to) => (Array.isArray(box) ? box : fail("slice", box))
      .slice(from === null ? 0 : Number(int(from)), to === null ? undefined : Number(int(to))),
    unpack: (x, count) => { const values = list(x); return values.length === count ? values : fail("unpacking", x); },
    commas: (x) => `${int(x)}`.replace(/\B(?=(\d{3})+$)/g, ","),
    two_digits: (x) => (int(x) < 0n ? fail("negative digits", x) : `${int(x)}`.padStart(2, "0")),
    append: (box, x) => { box.push(x); return null; },
    items: (map) => [...map.entries()],
    keys: (map) => [...map.keys()],
    values: (map) => [...map.values()],
    join: (between, parts) => list(parts).map(text).join(text(between)),
    endswith: (x, end) => text(x).endsWith(text(end)),
    replace: (x, from, to) => text(x).split(text(from)).join(text(to)),
    union: (set, ...more) => new Set([...set, ...more.flatMap(list)]),
    // records
    fill: (record, values) => record.constructor.fields.forEach((name, i) => {
      record[name] = values[i] === undefined ? fail(`a record without ${name}`) : values[i];
    }),
    replaced: (record, changes) => {
      const { fields } = record.constructor;
      for (const name of Object.keys(changes)) if (!fields.includes(name)) fail(`replacing ${name}`);
      return new record.constructor(...fields.map((name) => (name in changes ? changes[name] : record[name])));
    },
    once: (record, name, compute) => {
      const value = compute();
      Object.defineProperty(record, name, { value });
      return value;
    },
    opaque: () => fail("a call of what was not translated"),
  };
})();
