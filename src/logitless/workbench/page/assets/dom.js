// Elements, numbers and the theme.
const SVG = "http://www.w3.org/2000/svg";
const build = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
};
const el = (name, attributes = {}, ...children) => build(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) => build(document.createElementNS(SVG, name), attributes, children);
const card = (id, title, ...children) =>
  el("section", { class: "card", "aria-labelledby": id }, el("h2", { id }, title), ...children);
const scroll = (label, table) => el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, table);
const table = (columns, rows) => el("table", {},
  el("thead", {}, el("tr", {}, ...columns.map(([text, kind]) => el("th", { scope: "col", class: kind }, text)))),
  el("tbody", {}, ...rows));
const swatch = (hue) => el("span", { class: "swatch", style: `--hue: ${hue}`, "aria-hidden": "true" });

const UNIT = units === "GB" ? 1e9 : 2 ** 30;
// Ticks of 1, 2 or 5 times a power of ten, about `count` of them up to `most` bytes.
const ticks = (most, count) => {
  const rough = most / UNIT / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((k) => k * power >= rough) * power * UNIT;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
};
const tickText = (bytes) => `${Number((bytes / UNIT).toPrecision(3))}`;
// Draws again whenever the width of its element changes.
const redrawn = (element, draw) => {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth !== width) { width = element.clientWidth; draw(); }
  }).observe(element);
};

const theme = document.getElementById("theme");
const dark = () => (document.documentElement.dataset.theme
  ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const label = () => { theme.setAttribute("aria-pressed", String(dark())); };
theme.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; label(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
label();
