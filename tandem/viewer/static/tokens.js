// A sample's tokens, coloured by a column, with exact values of the token under the pointer or chosen by key.
import { Pager, Pairs, html, number, text, useEffect, useMemo, useRef, useState, visible } from "./ui.js";

const WINDOW = 4000; // most tokens in one answer of the server

// The first choices of a colouring, and their columns. Values around zero have two colours, other values one.
const COLOURS = [
  ["advantage", "advantages", "two"],
  ["log-prob", "rollout_log_probs", "one"],
  ["ratio", "ratio", "ratio"],
  ["difference", "difference", "two"],
  ["entropy", "entropy", "one"],
  ["mask", "response_mask", "one"],
  ["version", "policy_version", "one"],
];

export function colourings(columns) {
  const known = COLOURS.filter(([, column]) => column in columns);
  const others = Object.keys(columns).filter((column) => !COLOURS.some(([, named]) => named === column));
  return [...known, ...others.map((column) => [column.replaceAll("_", " "), column, "two"])];
}

// Returns the least and the greatest value over the tokens that the policy wrote. Both are infinite if there is none.
function extremes(values, mask) {
  const own = values.filter((value, i) => value !== null && (!mask || mask[i])).map(Number);
  return [own.reduce((a, b) => Math.min(a, b), Infinity), own.reduce((a, b) => Math.max(a, b), -Infinity)];
}

// Returns the strength of each value's colour, from -1 to 1.
export function strengths(values, mask, kind) {
  const logarithm = (value) => (value === null ? null : Math.log(Math.max(value, 1e-12)));
  const moved = kind === "ratio" ? values.map(logarithm) : values;
  const [low, high] = extremes(moved, mask);
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return moved.map((value) => {
    if (value === null || low > high) return 0;
    if (kind !== "one") return Math.max(-1, Math.min(1, value / most));
    return high === low ? Number(Boolean(value)) : (value - low) / (high - low);
  });
}

function tint(strength) {
  if (!strength) return undefined;
  const share = Math.round(Math.abs(strength) * 62);
  return `color-mix(in srgb, var(--${strength > 0 ? "plus" : "minus"}) ${share}%, transparent)`;
}

function Scale({ values, mask, kind }) {
  const [low, high] = extremes(values, mask);
  if (low > high) return null;
  const middle = kind === "ratio" ? 1 : 0;
  const most = Math.max(Math.abs(low - middle), Math.abs(high - middle));
  const [from, to] = kind === "one" ? [low, high] : [middle - most, middle + most];
  return html`<span class=${`scale ${kind === "one" ? "" : "two"}`}>
    <span>${number(from, 3)}</span><i></i><span>${number(to, 3)}</span>
  </span>`;
}

function exact(value) {
  if (value === null) return "–";
  return typeof value === "boolean" ? { true: "yes", false: "no" }[value] : String(value);
}

function Details({ data, at }) {
  const { tokens, columns } = data;
  if (at === null || at >= tokens.ids.length) {
    return html`<p class="note">Point at a token to see its values, or use ← and →.</p>`;
  }
  const pairs = [
    ["token", html`<span class="token-text">${visible(JSON.stringify(tokens.texts[at] || ""))}</span>`],
    ["id", tokens.ids[at]],
    ["position", tokens.start + at],
    ...Object.entries(columns).map(([name, values]) => [
      text(name.replaceAll("_", " ")),
      html`<span data-value=${name}>${exact(values[at])}</span>`,
    ]),
  ];
  return html`<${Pairs} kind="values" pairs=${pairs} />`;
}

// The tokens in a row. `at` is the token whose values are shown. `over` and `choose` are called with the token
// that is pointed at or clicked.
function Row({ data, strong, at, tinted, over, choose, press }) {
  const { tokens, columns } = data;
  const box = useRef(null);
  const pieces = useMemo(
    () => tokens.ids.map((id, i) => visible((tokens.texts[i] || `${id} `).replaceAll("\n", "⏎\n"))),
    [data],
  );
  const place = (event) => {
    const found = event.target.closest?.("[data-at]");
    return found ? Number(found.dataset.at) : null;
  };
  useEffect(() => box.current.querySelector(".at")?.scrollIntoView({ block: "nearest" }), [at]);
  return html`<div class="tokens" ref=${box} tabindex="0" role="group" aria-label="Tokens; use the arrow keys to move"
    onKeyDown=${press} onPointerOver=${(event) => over(place(event))} onPointerLeave=${() => over(null)}
    onClick=${(event) => place(event) !== null && choose(place(event))}>
    ${pieces.map((piece, i) => {
      const given = columns.response_mask && !columns.response_mask[i];
      const background = given && !tinted ? undefined : tint(strong[i]);
      const kind = `${i === at ? "at" : ""} ${given ? "given" : ""}`;
      return html`<span data-at=${i} class=${kind} style=${{ background }}>${piece}</span>`;
    })}
  </div>`;
}

export function Tokens({ data, params, set }) {
  const { tokens, columns, lacking } = data;
  const { start: first, total } = tokens;
  const last = first + tokens.ids.length;
  const options = colourings(columns);
  const wanted = params.get("colour");
  const [label, column, kind] = options.find(([name]) => name === wanted) || options[0] || ["", "", "one"];
  const [over, setOver] = useState(null);
  const chosen = params.has("token") ? Number(params.get("token")) - first : null;
  const at = over ?? chosen;
  const values = columns[column] || [];
  const ofMask = column === "response_mask";
  const mask = ofMask ? null : columns.response_mask;
  const strong = useMemo(() => strengths(values, mask, kind), [data, column]);
  const choose = (place) => {
    setOver(null);
    set({ token: first + Math.max(0, Math.min(tokens.ids.length - 1, place)) });
  };
  const press = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    choose((at ?? (move > 0 ? -1 : tokens.ids.length)) + move);
  };
  const absent = Object.entries(lacking).map(([name, why], i) => html`${i ? "; " : ""}<b>${name}</b>${`, because ${why}`}`);
  return html`<div class="controls">
      <label>Colour
        <select value=${label} onChange=${(event) => set({ colour: event.target.value })}>
          ${options.map(([name]) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      ${values.length > 0 && html`<${Scale} values=${values} mask=${mask} kind=${kind} />`}
      <span class="spring"></span>
      ${total > tokens.ids.length &&
      html`<${Pager} label="Pages of tokens" titles=${["Earlier", "Later"]} step=${WINDOW} ...${{ first, last, total }}
        onTurn=${(start) => set({ start: start || null, token: null })}>tokens ${first}–${last - 1} of ${total}</${Pager}>`}
    </div>
    <div class="token-view">
      <${Row} data=${data} strong=${strong} at=${at} tinted=${ofMask} over=${setOver} choose=${choose} press=${press} />
      <aside aria-live="polite" aria-label="Values of the token"><${Details} data=${data} at=${at} /></aside>
    </div>
    ${absent.length > 0 && html`<p class="note">Not in this run: ${absent}.</p>`}`;
}
