// A profile: the timeline of one traced step or of several side by side, their stages, and what is alive at the peak.
const RUN_HUES = ["#d1495b", "#30638e", "#66a182", "#edae49", "#9c6ade"];

const startProfile = (main) => {
  const runs = Object.entries(profile.runs ?? { "this step": profile });
  const bytes = (count) => planner.format_bytes(BigInt(count), units);
  const hue = (i) => RUN_HUES[i % RUN_HUES.length];
  const title = (name) => (runs.length > 1 ? `: ${name}` : "");
  const picture = el("div");
  main.append(card("timeline", "Timeline",
    el("p", { class: "muted" }, "Bytes alive after each allocation and each release; in a stage of many, the most of each few."),
    el("figure", {}, picture, el("ul", { class: "legend" },
      ...runs.map(([name, run], i) => el("li", {}, swatch(hue(i)),
        `${name}: peak ${bytes(run.peak.bytes)} in ${run.peak.stage}`))))));
  redrawn(picture, () => drawTimeline(picture, runs, hue, bytes));

  const names = [...new Set(runs.flatMap(([, run]) => run.stages.map((stage) => stage.name)))];
  main.append(card("stages", "Stages", scroll("Stages", table(
    [["stage"], ...runs.flatMap(([name]) => [[`alive at its end${title(name)}`, "number"], [`peak${title(name)}`, "number"]])],
    names.map((stage) => el("tr", { class: runs.some(([, run]) => run.peak.stage === stage) && "peak" },
      el("th", { scope: "row" }, stage),
      ...runs.flatMap(([, run]) => {
        const found = run.stages.filter((s) => s.name === stage);
        const last = found[found.length - 1];
        return [last?.bytes, found.length ? Math.max(...found.map((s) => s.peak_bytes)) : undefined]
          .map((count) => el("td", { class: "number" }, count === undefined ? "–" : bytes(count)));
      })))))));
  main.append(el("div", { class: "pair" }, ...runs.map(([name, run], i) => peakCard(run, i, title(name), bytes))));
  const savings = profile.savings ?? [], lint = [...new Set(runs.flatMap(([, run]) => run.lint.map(findingText)))];
  if (savings.length) main.append(card("savings", "Savings, each traced", scroll("Savings", table(
    [["saving"], ["peak", "number"], ["saved", "number"]], savings.map((saving) => el("tr", {},
      el("th", { scope: "row" }, saving.saving), el("td", { class: "number" }, bytes(saving.peak.bytes)),
      el("td", { class: "number" }, bytes(saving.saved_bytes))))))));
  if (lint.length) main.append(card("lint", "Tensors on another device", el("ul", {}, ...lint.map((text) => el("li", {}, text)))));
};

const peakCard = (run, i, title, bytes) => card(`peak-${i}`, `At the peak${title}`,
  el("p", {}, `${bytes(run.peak.bytes)} in ${run.peak.stage}, asked for by ${run.peak.op || "the step"} in ${run.peak.module || "the model"}.`),
  scroll(`Categories at the peak${title}`, table([["category"], ["bytes", "number"]],
    Object.entries(run.peak.categories).map(([category, count]) =>
      el("tr", {}, el("th", { scope: "row" }, category), el("td", { class: "number" }, bytes(count)))))),
  el("details", {}, el("summary", {}, "The largest tensors"),
    scroll(`Largest tensors${title}`, table([["tensor"], ["bytes", "number"], ["category"], ["made by"]],
      run.peak.tensors.map((t) => el("tr", {},
        el("th", { scope: "row" }, `(${t.shape.join(", ")}) ${t.dtype}`), el("td", { class: "number" }, bytes(t.bytes)),
        el("td", {}, t.category), el("td", {}, [t.op, t.module].filter(Boolean).join(" in "))))))));

// Step lines of the runs over each other. A stage takes the same width in all of them, so that they line up.
const LEAST = 0.06; // of the width, for a stage of few events
const stageWidths = (runs) => {
  const names = [...new Set(runs.flatMap((run) => run.stages.map((s) => s.name)))].filter((name) => name !== "parameters");
  const length = (run) => Math.max(1, run.stages[run.stages.length - 1].end);
  const shares = names.map((name) => Math.max(LEAST, runs.reduce((sum, run) => sum + run.stages
    .filter((s) => s.name === name).reduce((n, s) => n + s.end - s.start, 0) / length(run), 0) / runs.length));
  const total = shares.reduce((a, b) => a + b, 0);
  let place = 0;
  return new Map(names.map((name, i) => [name, [place, (place += shares[i] / total)]]));
};
const tracePoints = (run, widths) => run.stages.filter((stage) => widths.has(stage.name)).flatMap((stage) => {
  const [from, to] = widths.get(stage.name), span = Math.max(1, stage.end - stage.start);
  const inside = run.timeline.filter(([event]) => event > stage.start && event < stage.end);
  return [...inside, [stage.end, stage.bytes]].map(([event, count]) => [from + ((to - from) * (event - stage.start)) / span, count]);
});

const drawTimeline = (picture, runs, hue, bytes) => {
  const width = picture.clientWidth || 720, height = 320, left = 44, bottom = height - 40, top = 12;
  const most = 1.04 * Math.max(1, ...runs.map(([, run]) => run.peak.bytes));
  const widths = stageWidths(runs.map(([, run]) => run));
  const x = (place) => left + place * (width - left - 4);
  const y = (count) => bottom - (count / most) * (bottom - top);
  const parts = ticks(most, 5).flatMap((count) => [
    shape("line", { class: "grid", x1: left, x2: width - 4, y1: y(count), y2: y(count) }),
    shape("text", { class: "muted", x: left - 8, y: y(count) + 4, "text-anchor": "end" }, count ? tickText(count) : units)]);
  runs.forEach(([name, run], i) => {
    const points = tracePoints(run, widths), start = run.stages[0].bytes;
    const line = `M${x(0)} ${y(start)}` + points.map(([place, count]) => `H${x(place)}V${y(count)}`).join("");
    parts.push(shape("path", { class: "hue", style: `--hue: ${hue(i)}`, d: `${line}V${bottom}H${left}Z`, "fill-opacity": 0.16 }),
      shape("path", { class: "trace", style: `--hue: ${hue(i)}`, d: line },
        shape("title", {}, `${name}: peak ${bytes(run.peak.bytes)}`)));
  });
  for (const [name, [from, to]] of widths) {
    if (from) parts.push(shape("line", { class: "mark", x1: x(from), x2: x(from), y1: top, y2: bottom }));
    const room = x(to) - x(from), words = name.replace(/^after (full )?/, "").split(" ");
    if (room < 6.4 * Math.max(...words.map((word) => word.length))) continue; // no words over words
    words.forEach((word, k) => parts.push(
      shape("text", { class: "muted", x: (x(from) + x(to)) / 2, y: bottom + 16 + 15 * k, "text-anchor": "middle" }, word)));
  }
  const said = runs.map(([name, run]) => `${name}: peak ${bytes(run.peak.bytes)} in ${run.peak.stage}`).join("; ");
  picture.replaceChildren(shape("svg", { role: "img", viewBox: `0 0 ${width} ${height}`, height,
    "aria-label": `Bytes alive over the step. ${said}. The table of stages holds the same numbers.` }, ...parts));
};
const findingText = (f) => {
  const made = f.made_file === null ? "made before the trace" : `made at ${f.made_file}:${f.made_line}: ${f.made_code}`;
  return `${f.file}:${f.line}: ${f.op} mixes a ${f.device} tensor of shape (${f.shape.join(", ")}) with the model's device; ${made}`;
};
