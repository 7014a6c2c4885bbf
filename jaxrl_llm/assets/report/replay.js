// Shows the tokens of a replayed step. Only completions near the window have their tokens in the document.
const HEAD = 240; // first tokens of a long completion, which are shown before it is opened
const TAIL = 80; // last tokens of it, which are also shown
const KINDS = { float16: Float16Array, float32: Float32Array, uint32: Uint32Array, uint8: Uint8Array };
const element = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const make = (tag, className, textContent = "") => Object.assign(document.createElement(tag), { className, textContent });
const clamp = (x, low, high) => Math.max(low, Math.min(x, high));

const { step, places, starts, sizes, ids, texts, types, scales } = JSON.parse(element("data").textContent);
const lowerTexts = texts.map((text) => text.toLowerCase());
const quantities = Object.keys(scales);
const completions = all(".completed");
const arrays = {}; // name -> numbers of the tokens of all completions
const drawn = new Set(); // completions whose tokens are in the document
let [quantity, query] = ["", ""]; // name of the array that colors the tokens, and the searched text
let current = null; // token whose numbers are shown: { completion, t, pinned }

async function load(name) {
  if (name in arrays) return;
  const packed = Uint8Array.fromBase64(element(`array-${name}`).textContent);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  arrays[name] = new KINDS[types[name]](await new Response(stream).arrayBuffer());
}

const number = (x) => (x && Math.abs(x) < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(3)))).replaceAll("-", "−");
const yesOrNo = (x) => ["no", "yes"][x] ?? number(x); // with several epochs, a loss may clip a token in some of them
const logprob = (x) => `${number(x)} (${number(100 * Math.exp(x))} %)`;
const FORMATS = { lag: (x) => `weights of step ${step - 1 - x}`, ratio: (x) => number(Math.exp(x)), clipped: yesOrNo, masked: yesOrNo };
const format = (name, x) => (FORMATS[name] ?? (name.endsWith("logprobs") ? logprob : number))(x);

// The color of token i: 1 and -1 are the strongest first and second color, 0 is no color.
function level(i) {
  const x = quantity === "clipped" ? arrays.clipped[i] || -(arrays.masked?.[i] ?? 0) : arrays[quantity][i];
  return arrays.trained[i] && scales[quantity] ? clamp(x / scales[quantity], -1, 1) || 0 : 0;
}

const searchedTexts = ({ first, size }) => Array.from(arrays.token.subarray(first, first + size), (token) => lowerTexts[token]);

// The tokens of a completion that hold a part of the searched text.
function hits(completion) {
  const found = new Set();
  const parts = query ? searchedTexts(completion) : [], text = parts.join("");
  const owners = parts.flatMap((part, t) => Array(part.length).fill(t)); // the token of each character
  for (let at = text.indexOf(query); query && at >= 0; at = text.indexOf(query, at + 1))
    owners.slice(at, at + query.length).forEach((t) => found.add(t));
  return found;
}

function draw(completion) {
  const { first, size } = completion, found = hits(completion), nodes = [];
  const hasTurns = arrays.trained.subarray(first, first + size).includes(0);
  const isHidden = (t) => t >= HEAD && t < size - TAIL;
  const isCut = !completion.whole && ![...found].some(isHidden);
  let part, turn = 0;
  for (let t = 0; t < size; t++) {
    const i = first + t, x = level(i), trained = arrays.trained[i];
    const begins = !t || trained !== arrays.trained[i - 1]; // a turn, or a text of the environment
    turn += begins && trained;
    if (isCut && t === HEAD && isHidden(t)) nodes.push(make("button", "more", `show ${size - HEAD - TAIL} more tokens`));
    if (isCut && isHidden(t)) continue;
    if (begins && hasTurns) nodes.push(make("span", "turn", trained ? `turn ${turn}` : "text of the environment, not trained on"));
    if (begins || (isCut && t === size - TAIL)) nodes.push((part = make("span", trained ? "" : "observation")));
    const token = make("span", `${x < 0 ? "low" : ""} ${found.has(t) ? "hit" : ""}`, texts[arrays.token[i]].replaceAll("\n", "↵\n") || "▫");
    token.dataset.t = t;
    token.style.setProperty("--level", Math.abs(x).toFixed(2));
    part.append(token);
  }
  completion.style.minHeight = "";
  completion.querySelector(".tokens").replaceChildren(...nodes);
  drawn.add(completion);
  if (current?.completion === completion) spanOf(current)?.classList.add("at");
  drawStrip(completion);
}

// Draws one pixel for each token, which the style stretches to the width of the text.
function drawStrip({ first, size, canvas }) {
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const [low, high] = ["--low", "--high"].map((name) => style.getPropertyValue(name));
  canvas.width = size;
  for (let t = 0; t < size; t++) {
    const x = level(first + t);
    context.fillStyle = x < 0 ? low : high;
    context.globalAlpha = Math.abs(x);
    context.fillRect(t, 0, 1, 1);
  }
}

const spanOf = ({ completion, t }) => completion.querySelector(`[data-t="${t}"]`);

function hide() {
  for (const span of all(".at")) span.classList.remove("at");
  element("card").hidden = true;
  current = null;
}

// Shows the numbers of a token. pinned: whether they stay when the mouse leaves the token.
function show(completion, t, pinned) {
  const i = completion.first + t, token = arrays.token[i], card = element("card");
  hide();
  current = { completion, t, pinned };
  if (!spanOf(current)) draw(Object.assign(completion, { whole: true }));
  spanOf(current).classList.add("at");
  if (pinned) spanOf(current).scrollIntoView({ block: "nearest" });
  element("text").textContent = JSON.stringify(texts[token]);
  element("place").textContent = `token ${t + 1} of ${completion.size}, id ${ids[token]}, [${[...places[completion.index], t].join(", ")}] in the arrays`;
  [element("untrained").hidden, element("numbers").hidden] = [arrays.trained[i], !arrays.trained[i]];
  for (const cell of all("[data-column]")) cell.textContent = format(cell.dataset.column, arrays[cell.dataset.column]?.[i] ?? NaN);
  card.hidden = false;
  const { left, top, bottom } = spanOf(current).getBoundingClientRect(), height = card.offsetHeight + 8;
  card.style.left = `${clamp(left, 8, innerWidth - card.offsetWidth - 8)}px`;
  card.style.top = `${scrollY + (bottom + height < innerHeight ? bottom + 8 : Math.max(8, top - height))}px`;
}

async function choose(name) {
  await Promise.all([name, "masked"].filter((array) => array in types).map(load));
  quantity = name;
  document.documentElement.dataset.shown = name;
  for (const button of all("[data-quantity]")) button.setAttribute("aria-pressed", button.dataset.quantity === name);
  for (const meaning of all("[data-meaning]")) meaning.hidden = meaning.dataset.meaning !== name;
  const signed = ["advantage", "ratio"].includes(name) || (name === "clipped" && "masked" in types);
  const ends = [signed ? -scales[name] : 0, scales[name]].map((x) => format(name, x));
  [element("low").textContent, element("high").textContent] = name === "clipped" ? [signed ? "masked out" : "", "clipped"] : ends;
  document.querySelector(".scale").classList.toggle("amount", !signed);
  drawn.forEach(draw);
}

// Opens the completion after (offset 1) or before (-1) the focused one, or else the first one in the window.
function go(offset) {
  const visible = all(".completed:not([hidden])");
  const focused = visible.indexOf(document.activeElement.closest(".completed"));
  const inWindow = visible.findIndex((completion) => completion.getBoundingClientRect().bottom > 150) - (offset > 0);
  open(visible[clamp((focused < 0 ? inWindow : focused) + offset, 0, visible.length - 1)]);
}

function open(completion) {
  if (!completion?.matches(".completed")) return;
  draw(completion);
  history.replaceState(null, "", `#${completion.id}`);
  completion.focus({ preventScroll: true });
  completion.scrollIntoView();
}

element("search").addEventListener("input", ({ target }) => {
  query = target.value.toLowerCase();
  for (const group of all(".group")) {
    const members = all(".completed", group), inPrompt = group.querySelector(".prompt").textContent.toLowerCase().includes(query);
    for (const completion of members) completion.hidden = !inPrompt && !searchedTexts(completion).join("").includes(query);
    group.hidden = members.every((completion) => completion.hidden);
  }
  element("found").textContent = query && `${all(".completed:not([hidden])").length} of ${completions.length} completions`;
  drawn.forEach(draw);
});
document.addEventListener("keydown", (event) => {
  const { key, target } = event, move = { ArrowLeft: -1, ArrowRight: 1 }[key], offset = { j: 1, k: -1 }[key];
  const { completion, t } = current ?? { completion: target.closest(".completed"), t: -1 };
  if (key === "Escape") hide();
  if (target.matches("input") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (move && completion) show(completion, clamp(t + move, 0, completion.size - 1), true);
  else if (offset) go(offset);
  else if (key === "/") element("search").focus();
  else if (quantities[key - 1]) choose(quantities[key - 1]);
  else return;
  event.preventDefault();
});
document.addEventListener("click", ({ target, offsetX }) => {
  const completion = target.closest(".completed"), { t, quantity, offset } = target.dataset;
  if (t) show(completion, Number(t), true);
  else if (target.matches(".strip")) show(completion, Math.floor((offsetX / target.clientWidth) * completion.size), true);
  else if (target.matches(".more")) draw(Object.assign(completion, { whole: true }));
  else if (quantity) choose(quantity);
  else if (offset) go(Number(offset));
  else if (!target.closest("#card")) hide();
});
document.addEventListener("mouseover", ({ target }) => {
  if (current?.pinned) return;
  if (target.dataset?.t) show(target.closest(".completed"), Number(target.dataset.t), false);
  else if (current) hide();
});
addEventListener("hashchange", () => open(element(location.hash.slice(1))));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));

// Draws the completions that come near the window, and empties the others, which keep their heights.
const observer = new IntersectionObserver((changes) => {
  for (const { target, isIntersecting, boundingClientRect } of changes) {
    if (isIntersecting && !drawn.has(target)) draw(target);
    if (isIntersecting || !drawn.delete(target)) continue;
    target.style.minHeight = `${boundingClientRect.height}px`;
    target.querySelector(".tokens").replaceChildren();
  }
}, { rootMargin: "1000px 0px" });

await Promise.all(["token", "trained"].map(load));
await choose(quantities[0]);
for (const [index, completion] of completions.entries()) {
  Object.assign(completion, { index, first: starts[index], size: sizes[index], canvas: completion.querySelector(".strip") });
  completion.style.setProperty("--shown", Math.min(sizes[index], HEAD + TAIL));
  observer.observe(completion);
}
open(element(location.hash.slice(1)));
for (const name of Object.keys(types)) await load(name);
