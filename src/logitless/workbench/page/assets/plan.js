// The plan: controls, verdicts, bars and tables. Every number of bytes comes from `planner`, which is translated.
const startPlan = (main) => {
  const start = planner.setting;
  const split = start.tensor_parallel * start.context_parallel;
  const powers = (from, to, times = 1n) => {
    const found = [];
    for (let v = from; v <= to; v *= 2n) found.push(v * times);
    return found;
  };
  const SIZES = [8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 288]; // GPUs that are sold
  const SLIDERS = [
    ["gpu_bytes", "GPU memory", `${units} of each`, SIZES.map((size) => BigInt(size * UNIT)), BigInt(UNIT)],
    ["gpus", "GPUs", "all of them together", powers(1n, 1024n, split)],
    ["batch_size", "Batch size", "prompts per optimizer step, all GPUs", powers(1n, 4096n)],
    ["length", "Sequence length", "tokens, prompt and response", powers(128n, 1n << 20n)],
  ];
  const NUMBERS = [
    ["micro_batch", "Micro-batch", "rows per forward pass on each GPU; 0: all"],
    ["responses_per_prompt", "Responses per prompt", "the group of grpo and intuitor"],
    ["lora_rank", "LoRA rank", "0: train everything"],
    ["mlp_tiles", "MLP tiles", "pieces of the sequence, one at a time"],
  ];
  const CHECKS = [
    ["gradient_checkpointing", "Gradient checkpointing"],
    ["offload_activations", "Offload activations"],
    ["master_weights", "fp32 master weights"],
  ];
  const NAMES = { algorithm: "Algorithm", sharding: "Sharding", optimizer: "Optimizer", attention: "Attention" };
  let wanted, shown, ways = "both", chosen = null;

  const initial = () => {
    const given = { model: start.model.name, length: start.length };
    for (const name of ["gpu_bytes", "gpus", "batch_size", ...NUMBERS.map(([n]) => n), ...CHECKS.map(([n]) => n), ...Object.keys(NAMES)])
      given[name] = start[name];
    return given;
  };
  const compute = () => {
    const { length, model, ...rest } = wanted;
    const setting = planner.replaced(start, { ...rest, model: planner.models.get(model) });
    return planner.both(planner.at_length(setting, length));
  };

  // --- controls ---
  const alert = el("p", { class: "alert", role: "alert" });
  const link = el("a", { id: "link" }, "Link to this setting"), command = el("code", { id: "command" });
  const refreshers = [];
  const set = (name, value) => { wanted[name] = value; update(); };
  const control = (name, label, hint, ...inputs) => el("div", { class: "control" },
    el("label", { for: name }, label), el("div", { class: "row" }, ...inputs),
    hint && el("small", { id: `${name}-hint` }, hint));
  const whole = (text, scale) => {
    const plain = text.replace(/[\s,_]/g, "");
    if (/^\d{1,30}$/.test(plain)) return BigInt(plain) * scale;
    return scale > 1n && /^\d{1,9}\.\d{1,3}$/.test(plain) ? BigInt(Math.round(Number(plain) * Number(scale))) : null;
  };
  const inScale = (count, scale) => (count % scale ? String(Number((Number(count) / Number(scale)).toFixed(3))) : String(count / scale));
  // A field of text: of a number field the browser hides what it cannot read, and nothing could be said about it.
  const numberBox = (name, label, attributes, scale = 1n) => {
    const box = el("input", { type: "text", inputmode: "numeric", autocomplete: "off", ...attributes,
      onchange: () => {
        const value = whole(box.value, scale);
        if (value !== null) return set(name, value);
        box.setAttribute("aria-invalid", "true");
        alert.textContent = `${label}: expected a number${scale > 1n ? ` of ${units}` : ""}, got "${box.value.slice(0, 40)}"`;
      } });
    refreshers.push(() => { box.value = inScale(wanted[name], scale); box.removeAttribute("aria-invalid"); });
    return box;
  };
  const slider = ([name, label, hint, steps, scale]) => {
    const values = [...new Set([...steps, wanted[name]])].sort((a, b) => (a < b ? -1 : 1));
    const range = el("input", { type: "range", id: name, min: "0", max: String(values.length - 1), step: "1",
      "aria-describedby": `${name}-hint`, oninput: () => set(name, values[Number(range.value)]) });
    refreshers.push(() => {
      const at = values.findLastIndex((v) => v <= wanted[name]);
      range.value = String(Math.max(0, at));
      range.setAttribute("aria-valuetext", scale ? bytes(wanted[name]) : wanted[name].toLocaleString("en"));
    });
    const attributes = { id: `${name}-exact`, "aria-label": `${label}, exact` };
    return control(name, label, hint, range, numberBox(name, label, attributes, scale));
  };
  const select = (name, label, options) => {
    const box = el("select", { id: name, onchange: () => set(name, box.value) },
      ...options.map((value) => el("option", { value }, value)));
    refreshers.push(() => { box.value = wanted[name]; });
    return control(name, label, null, box);
  };
  const check = ([name, label]) => {
    const box = el("input", { type: "checkbox", id: name, onchange: () => set(name, box.checked) });
    refreshers.push(() => { box.checked = wanted[name]; });
    return el("label", { class: "check" }, box, label);
  };
  const controls = () => card("setting", "Setting",
    el("div", { class: "controls" }, select("model", "Model", [...planner.models.keys()]), ...SLIDERS.map(slider)),
    el("details", {}, el("summary", {}, "Algorithm and what is kept"),
      el("div", { class: "controls" },
        ...Object.entries(NAMES).map(([name, label]) => select(name, label, planner.choices.get(name))),
        ...NUMBERS.map(([name, label, hint]) =>
          control(name, label, hint, numberBox(name, label, { id: name, "aria-describedby": `${name}-hint` }))),
        el("div", { class: "control" }, ...CHECKS.map(check)))),
    el("div", { class: "actions" },
      el("button", { type: "button", id: "reset", onclick: () => { wanted = initial(); update(); } }, "Back to the setting as given"), link),
    el("p", { class: "command" }, command),
    alert);

  // --- the setting as an address and as a command ---
  const address = () => {
    const given = initial();
    const changed = Object.entries(wanted).filter(([name, value]) => value !== given[name]);
    return `#${new URLSearchParams(changed.map(([name, value]) => [name, String(value)]))}`;
  };
  const allowed = (name) => (name === "model" ? [...planner.models.keys()] : planner.choices.get(name));
  const read = (text, name, like) => {
    if (typeof like === "bigint") return /^\d{1,30}$/.test(text) ? BigInt(text) : null;
    if (typeof like === "boolean") return ["true", "false"].includes(text) ? text === "true" : null;
    return allowed(name).includes(text) ? text : null;
  };
  // Sets what the address says; returns what is wrong with it, or nothing.
  const restore = () => {
    const given = initial(), wrong = [];
    for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
      const value = name in given ? read(text, name, given[name]) : null;
      if (value === null) wrong.push(`${name}=${text}`.slice(0, 60));
      else given[name] = value;
    }
    wanted = given;
    return wrong.length ? `the link's ${wrong.join(", ")} cannot be read, and is left out` : "";
  };
  const quoted = (text) => (/^[\w@%+=:,.\/-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);
  // As workbench/plan/commands.py's `planned`, which the tests hold it equal to.
  const commandOf = (setting) => {
    const gib = 1n << 30n, size = setting.gpu_bytes % gib ? `${setting.gpu_bytes}B` : `${setting.gpu_bytes / gib}GiB`;
    const words = [`logitless plan --model ${quoted(setting.model.name)}`, `--gpus ${setting.gpus}x${size}`];
    for (const name of planner.knobs) {
      const value = setting[name];
      const said = planner.always.includes(name) || (value !== planner.defaults[name] && !["model", "gpus", "gpu_bytes"].includes(name));
      const option = name.replaceAll("_", "-");
      if (!said) continue;
      words.push(typeof value === "boolean" ? `--${value ? "" : "no-"}${option}` : `--${option} ${quoted(value.name ?? String(value))}`);
    }
    return words.join(" ");
  };

  // --- results ---
  const bytes = (count) => planner.format_bytes(count, units);
  const visible = () => shown.filter((plan) => ways === "both" || plan.way === ways);
  const verdicts = el("div", { class: "verdicts", id: "verdicts", role: "status" });
  const verdict = (plan) => {
    const usable = plan.setting.gpu_bytes - plan.setting.reserve;
    const part = Math.min(100, (100 * Number(plan.peak)) / Number(usable));
    const margin = plan.fits ? `fits, ${bytes(plan.margin)} left` : `does not fit, ${bytes(-plan.margin)} too much`;
    return el("div", { class: `card verdict ${plan.fits ? "fits" : "fails"}`, id: `verdict-${plan.way}` },
      el("div", { class: "between" }, el("h3", {}, plan.way),
        el("span", { class: "badge" }, `${plan.fits ? "✓" : "✗"} ${margin}`)),
      el("div", { class: "peak" }, bytes(plan.peak), el("small", {}, ` in ${plan.peak_phase}, on each GPU`)),
      el("div", { class: "gauge", "aria-hidden": "true" }, el("div", { style: `width: ${part}%` })),
      el("p", { class: "muted" }, `largest single allocation: ${plan.largest.name}, ${bytes(plan.largest.largest)}`));
  };
  const picture = el("div"), legend = el("ul", { class: "legend" });
  const phases = el("div"), components = el("div"), notes = el("div", { class: "muted" });
  const choice = el("fieldset", { class: "choice" }, el("legend", {}, "Show"),
    ...["both", "dense", "logitless"].map((way) => el("label", {},
      el("input", { type: "radio", name: "ways", value: way, checked: way === ways,
        onchange: () => { ways = way; show(); } }), el("span", {}, way))));

  const phaseRow = (phase, [dense, ours]) => {
    const [before, after] = [dense.peaks.get(phase), ours.peaks.get(phase)];
    const strong = (plan) => (plan.peak_phase === phase ? "number strong" : "number");
    return el("tr", {},
      el("th", { scope: "row" }, el("button", { type: "button", "aria-pressed": String(chosen === phase),
        "data-phase": phase,
        onclick: () => {
          chosen = chosen === phase ? null : phase;
          show();
          phases.querySelector(`[data-phase="${phase}"]`).focus();
        } }, phase)),
      el("td", { class: strong(dense) }, bytes(before)), el("td", { class: strong(ours) }, bytes(after)),
      el("td", { class: "number" }, before === after ? "–" : bytes(before - after)));
  };
  const componentRows = ([dense, ours]) => {
    const all = ours.setting.kind.phases;
    const [theirs, mine] = [dense, ours].map((plan) => new Map(plan.components.map((c) => [c.name, c])));
    return [...new Set([...theirs.keys(), ...mine.keys()])].flatMap((name) => {
      const cells = [theirs.get(name), mine.get(name)], some = cells[1] ?? cells[0];
      if (chosen !== null && !cells.some((c) => c?.phases.includes(chosen))) return [];
      return el("tr", {},
        el("th", { scope: "row" }, swatch(hueOf(name)), name), el("td", { class: "shape" }, some.shape),
        ...cells.map((c) => el("td", { class: "number" }, c ? bytes(c.nbytes) : "–")),
        el("td", {}, planner.lives(some, all)));
    });
  };
  const hues = new Map(planner.categories.map(([name, hue]) => [name, hue]));
  const hueOf = (name) => hues.get(planner.category(name));

  const show = () => {
    const [dense, ours] = shown, list = ours.setting.kind.phases;
    document.getElementById("headline").textContent = planner.headline(ours.setting, units);
    verdicts.replaceChildren(...shown.map(verdict));
    notes.replaceChildren(...planner.notes(ours.setting, units).map((text) => el("p", {}, text)));
    drawBars(picture, visible(), hues, bytes);
    const used = new Set(visible().flatMap((plan) => plan.components.map((c) => planner.category(c.name))));
    legend.replaceChildren(...[...hues].filter(([name]) => used.has(name))
      .map(([name, hue]) => el("li", {}, swatch(hue), name)));
    phases.replaceChildren(scroll("Bytes in each phase", table(
      [["phase"], ["dense", "number"], ["logitless", "number"], ["saved", "number"]],
      list.map((phase) => phaseRow(phase, shown)))));
    components.replaceChildren(scroll("Components", table(
      [["component"], ["shape", "shape"], ["dense", "number"], ["logitless", "number"], ["lives"]],
      componentRows(shown))));
    document.getElementById("filter").textContent = chosen === null ? "" : `alive in ${chosen}`;
  };
  const update = () => {
    try {
      shown = compute();
      alert.textContent = "";
    } catch (error) {
      if (error.name !== "OptionError") throw error;
      alert.textContent = error.message;
      return;
    }
    refreshers.forEach((refresh) => refresh());
    link.setAttribute("href", address());
    history.replaceState(null, "", address());
    command.textContent = commandOf(shown[1].setting);
    if (chosen !== null && !shown[1].setting.kind.phases.includes(chosen)) chosen = null;
    show();
  };

  const open = () => {
    const wrong = restore();
    update();
    if (alert.textContent) { // the link's setting cannot be planned: say so, and plan the one as given
      const why = alert.textContent;
      wanted = initial();
      update();
      alert.textContent = why;
    }
    if (wrong) alert.textContent = wrong;
  };
  wanted = initial();
  main.append(controls(), verdicts,
    card("bars", "Peak of each phase", el("div", { class: "between" }, el("span", { class: "muted" }, "bytes alive on each GPU"), choice),
      el("figure", {}, picture, legend), notes),
    card("phases", "Phases", el("p", { class: "muted" }, "Choose a phase to see only what is alive in it."), phases),
    card("components", "Components", el("p", { class: "muted", id: "filter" }), components));
  open();
  addEventListener("hashchange", open);
  redrawn(picture, () => drawBars(picture, visible(), hues, bytes));
};

// Horizontal bars: a row for each phase, in it a bar for each plan, in it a segment for each category.
const drawBars = (picture, plans, hues, bytes) => {
  const width = picture.clientWidth || 720, narrow = width < 620;
  const left = narrow ? 0 : 190, right = narrow ? 4 : 84, thick = 15;
  const { setting } = plans[0], phases = setting.kind.phases;
  const usable = Number(setting.gpu_bytes - setting.reserve);
  const peak = Math.max(...plans.map((plan) => Number(plan.peak)));
  const near = peak > 0.3 * usable, most = near ? Math.max(peak, usable) * 1.01 : peak * 1.05;
  const x = (count) => left + (Number(count) / most) * (width - left - right);
  const line = narrow ? 33 : thick + 3, row = plans.length * line + (narrow ? 30 : 14), top = 22;
  const height = top + phases.length * row;
  const mark = (count, kind) => shape("line", { class: kind, x1: x(count), x2: x(count), y1: top - 6, y2: height });
  const words = []; // above the lines and bars
  const parts = ticks(most, narrow ? 4 : 7).flatMap((count) => [
    mark(count, "grid"),
    shape("text", { class: "muted", x: x(count), y: 10, "text-anchor": count ? "middle" : "start" },
      count ? tickText(count) : `0 ${units}`)]);
  phases.forEach((phase, i) => {
    const y = top + i * row + 4;
    const strong = plans.some((plan) => plan.peak_phase === phase) ? "strong" : "";
    words.push(shape("text", { class: strong, x: 0, y: y + 12 }, phase));
    plans.forEach((plan, k) => {
      const at = y + k * line + (narrow ? 34 : 0), end = x(plan.peaks.get(phase));
      const text = bytes(plan.peaks.get(phase));
      if (narrow) words.push(shape("text", { class: "muted", x: 0, y: at - 4 }, `${plan.way}: ${text}`));
      else words.push(shape("text", { class: "muted", x: left - 8, y: at + 12, "text-anchor": "end" }, plan.way),
        shape("text", { x: end + 6, y: at + 12 }, text));
      let before = 0n;
      for (const [name, hue] of [...hues].reverse()) {
        const count = plan.components.filter((c) => c.phases.includes(phase) && planner.category(c.name) === name)
          .reduce((sum, c) => sum + c.nbytes, 0n);
        if (!count) continue;
        parts.push(shape("rect", { class: "hue", style: `--hue: ${hue}`, x: x(before), y: at, height: thick,
          width: Math.max(0.5, x(before + count) - x(before)) },
          shape("title", {}, `${plan.way}, ${phase}, ${name}: ${bytes(count)}`)));
        before += count;
      }
    });
  });
  const limit = `usable ${bytes(setting.gpu_bytes - setting.reserve)}`;
  if (near) {
    const side = x(usable) > 0.7 * width ? "end" : x(usable) < 0.3 * width ? "start" : "middle";
    parts.push(mark(usable, "limit"));
    words.push(shape("text", { class: "limit", x: x(usable), y: height + 16, "text-anchor": side }, `${limit} on each GPU`));
  } else {
    const at = { class: "muted", x: width - right, y: height + 16, "text-anchor": "end" };
    words.push(shape("text", at, `${limit}, beyond the right edge`));
  }
  const said = plans.map((plan) => `${plan.way}: peak ${bytes(plan.peak)} in ${plan.peak_phase}`).join("; ");
  picture.replaceChildren(
    shape("svg", { role: "img", viewBox: `0 0 ${width} ${height + 22}`, height: height + 22,
      "aria-label": `Stacked bars of each phase. ${said}; ${limit} on each GPU. The tables below hold the same numbers.` },
    ...parts, ...words));
};
