// What is known of a token, beside it, for the pointer, a finger and the keyboard.
const about = document.getElementById("about");
const el = (name, attributes, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children); // strings become text, never markup
  return made;
};
const fill = (token) => {
  const facts = [["probability", token.probability], ["when drawn", token.drawn], ["rank", token.rank], ["entropy", token.entropy]];
  const best = token.best.map((other) => el("li", { class: other.own ? "own" : "", style: `--share: ${other.share}` },
    el("span", { dir: "auto" }, other.name), el("span", {}, other.probability)));
  about.replaceChildren(
    el("h3", {}, el("bdi", {}, token.name), " ", el("small", {}, `id ${token.id}`)),
    el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("ol", { "aria-label": "best tokens" }, ...best,
      ...(best.length ? [el("li", { style: "--share: 0" }, el("span", {}, "all others"), el("span", {}, token.rest))] : [])));
};
const place = (element) => {
  const rows = element.getClientRects(), box = rows.length ? rows[0] : element.getBoundingClientRect();
  const width = document.documentElement.clientWidth, height = document.documentElement.clientHeight;
  const below = box.bottom + 8 + about.offsetHeight <= height;
  const top = below ? box.bottom + 8 : Math.max(8, box.top - 8 - about.offsetHeight);
  about.style.left = `${Math.max(8, Math.min(box.left, width - about.offsetWidth - 8))}px`;
  about.style.top = `${top}px`;
};
let at = null;
const show = (element) => {
  if (at) at.classList.remove("at");
  at = element;
  at.classList.add("at");
  fill(sequences[element.dataset.s][element.dataset.t]);
  about.hidden = false;
  place(element);
};
const hide = () => {
  if (at) at.classList.remove("at");
  at = null;
  about.hidden = true;
};
const token = (event) => event.target.closest?.(".t");
document.addEventListener("pointerover", (event) => { const found = token(event); if (found) show(found); });
document.addEventListener("pointerout", (event) => {
  const focused = document.activeElement?.closest?.(".t");
  if (token(event) && !event.relatedTarget?.closest?.(".t")) focused ? show(focused) : hide();
});
document.addEventListener("scroll", () => { if (at) place(at); }, { passive: true });
// One stop of the Tab key per text; the arrows go from token to token.
for (const text of document.querySelectorAll(".text")) {
  const tokens = [...text.querySelectorAll(".t")];
  tokens.forEach((each, i) => {
    each.tabIndex = i ? -1 : 0;
    const known = sequences[each.dataset.s][each.dataset.t];
    each.setAttribute("role", "button");
    each.setAttribute("aria-label", `${known.name}, ${known.probability}`);
  });
  const go = (i) => {
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, i))];
    for (const each of tokens) each.tabIndex = each === next ? 0 : -1;
    next.focus();
  };
  text.addEventListener("focusin", (event) => show(token(event)));
  text.addEventListener("focusout", hide);
  text.addEventListener("click", (event) => { const found = token(event); if (found) go(tokens.indexOf(found)); });
  text.addEventListener("keydown", (event) => {
    const i = tokens.indexOf(token(event)), jump = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tokens.length - 1 };
    if (event.key in jump) { event.preventDefault(); go(jump[event.key]); }
    if (event.key === "Escape") { event.preventDefault(); document.activeElement.blur(); hide(); }
  });
}
