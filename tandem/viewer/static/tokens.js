// A sample's tokens, coloured by what is known of each; exact values of the one under the pointer or chosen by key.
import { Pairs, html, number, text, useEffect, useMemo, useRef, useState, visible } from "./ui.js";

const WINDOW = 4000; // tokens that the server gives at a time

// What people look for first, and the column that has it. Values about zero have two colours, others one.
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

// The strength of each value's colour, from -1 to 1, over the tokens that the policy wrote.
export function strengths(values, mask, kind) {
  const moved = values.map((value) =>
    value === null ? null : kind === "ratio" ? Math.log(Math.max(Number(value), 1e-12)) : Number(value),
  );
  const own = moved.filter((value, i) => value !== null && (!mask || mask[i]));
  if (!own.length) return values.map(() => 0);
  const low = own.reduce((a, b) => Math.min(a, b));
  const high = own.reduce((a, b) => Math.max(a, b));
  if (kind === "one")
    return moved.map((v) => (v === null || high === low ? (v && high === low ? 1 : 0) : (v - low) / (high - low)));
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return moved.map((value) => (value === null ? 0 : Math.max(-1, Math.min(1, value / most))));
}

function tint(strength) {
  if (!strength) return undefined;
  const share = Math.round(Math.abs(strength) * 62);
  return `color-mix(in srgb, var(--${strength > 0 ? "plus" : "minus"}) ${share}%, transparent)`;
}

function Scale({ values, mask, kind }) {
  const own = values.filter((value, i) => value !== null && (!mask || mask[i])).map(Number);
  if (!own.length) return null;
  const [low, high] = [own.reduce((a, b) => Math.min(a, b)), own.reduce((a, b) => Math.max(a, b))];
  const middle = kind === "ratio" ? 1 : 0;
  const most = Math.max(Math.abs(low - middle), Math.abs(high - middle));
  const [from, to] = kind === "one" ? [low, high] : [middle - most, middle + most];
  return html`<span class=${`scale ${kind === "one" ? "one" : "two"}`}>
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
    return html`<p class="note">Point at a token, or move over them with ← and →, to see its values.</p>`;
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

function Window({ tokens, set }) {
  const end = tokens.start + tokens.ids.length;
  const to = (start) => set({ start: Math.max(0, start) || null, token: null });
  return html`<span>tokens ${tokens.start}–${end - 1} of ${tokens.total} ${" "}
    <button type="button" disabled=${tokens.start === 0} onClick=${() => to(tokens.start - WINDOW)}>Earlier</button> ${" "}
    <button type="button" disabled=${end >= tokens.total} onClick=${() => to(end)}>Later</button>
  </span>`;
}

// The tokens in a row. `at` is the one whose values are shown; `over` and `choose` hear which is pointed at.
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
  return html`<div class="tokens" ref=${box} tabindex="0" role="group" aria-label="Tokens; arrow keys move from one to the next"
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
  const options = colourings(columns);
  const wanted = params.get("colour");
  const [label, column, kind] = options.find(([name]) => name === wanted) || options[0] || ["", "", "one"];
  const [over, setOver] = useState(null);
  const chosen = params.has("token") ? Number(params.get("token")) - tokens.start : null;
  const at = over ?? chosen;
  const values = columns[column] || [];
  const ofMask = column === "response_mask";
  const mask = ofMask ? null : columns.response_mask;
  const strong = useMemo(() => strengths(values, mask, kind), [data, column]);
  const choose = (place) => {
    setOver(null);
    set({ token: tokens.start + Math.max(0, Math.min(tokens.ids.length - 1, place)) });
  };
  const press = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    choose((at ?? (move > 0 ? -1 : tokens.ids.length)) + move);
  };
  const absent = Object.entries(lacking).map(([name, why], i) => html`${i ? "; " : ""}<b>${name}</b>${`, as ${why}`}`);
  return html`<div class="controls">
      <label>Colour
        <select value=${label} onChange=${(event) => set({ colour: event.target.value })}>
          ${options.map(([name]) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
      ${values.length > 0 && html`<${Scale} values=${values} mask=${mask} kind=${kind} />`}
      <span class="spring"></span>
      ${tokens.total > tokens.ids.length && html`<${Window} tokens=${tokens} set=${set} />`}
    </div>
    <div class="token-view">
      <${Row} data=${data} strong=${strong} at=${at} tinted=${ofMask} over=${setOver} choose=${choose} press=${press} />
      <aside aria-live="polite" aria-label="Values of the token"><${Details} data=${data} at=${at} /></aside>
    </div>
    ${absent.length > 0 && html`<p class="note">Not in this run: ${absent}.</p>`}`;
}
