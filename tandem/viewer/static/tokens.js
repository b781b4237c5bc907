// A sample's tokens, coloured by what is known of each; exact values of the one under the pointer or chosen by key.
import { html, number, useEffect, useRef, useState, visible } from "./ui.js";

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
  const moved = values.map((value) => (value === null ? null : kind === "ratio" ? Math.log(Math.max(Number(value), 1e-12)) : Number(value)));
  const own = moved.filter((value, i) => value !== null && (!mask || mask[i]));
  if (!own.length) return values.map(() => 0);
  const low = own.reduce((a, b) => Math.min(a, b));
  const high = own.reduce((a, b) => Math.max(a, b));
  if (kind === "one") return moved.map((v) => (v === null || high === low ? (v && high === low ? 1 : 0) : (v - low) / (high - low)));
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return moved.map((value) => (value === null ? 0 : Math.max(-1, Math.min(1, value / most))));
}

function tint(strength) {
  if (!strength) return undefined;
  return `color-mix(in srgb, var(--${strength > 0 ? "plus" : "minus"}) ${Math.round(Math.abs(strength) * 62)}%, transparent)`;
}

function Scale({ values, mask, kind }) {
  const own = values.filter((value, i) => value !== null && (!mask || mask[i])).map(Number);
  if (!own.length) return null;
  const [low, high] = [own.reduce((a, b) => Math.min(a, b)), own.reduce((a, b) => Math.max(a, b))];
  const middle = kind === "ratio" ? 1 : 0;
  const most = Math.max(Math.abs(low - middle), Math.abs(high - middle));
  return html`<span class=${`scale ${kind === "one" ? "one" : "two"}`}><span>${number(kind === "one" ? low : middle - most, 3)}</span><i></i><span>${number(kind === "one" ? high : middle + most, 3)}</span></span>`;
}

function Details({ data, at }) {
  const { tokens, columns } = data;
  if (at === null || at >= tokens.ids.length) return html`<p class="note">Point at a token, or move over them with ← and →, to see its values.</p>`;
  return html`<dl class="values">
    <div><dt>token</dt><dd class="token-text">${visible(JSON.stringify(tokens.texts[at] || ""))}</dd></div>
    <div><dt>id</dt><dd>${tokens.ids[at]}</dd></div>
    <div><dt>position</dt><dd>${tokens.start + at}</dd></div>
    ${Object.entries(columns).map(([name, values]) => html`<div><dt>${visible(name.replaceAll("_", " "))}</dt><dd data-value=${name}>${values[at] === null ? "–" : typeof values[at] === "boolean" ? (values[at] ? "yes" : "no") : String(values[at])}</dd></div>`)}
  </dl>`;
}

export function Tokens({ data, params, set }) {
  const { tokens, columns, lacking } = data;
  const options = colourings(columns);
  const wanted = params.get("colour");
  const [label, column, kind] = options.find(([name]) => name === wanted) || options[0] || ["", "", "one"];
  const [over, setOver] = useState(null);
  const box = useRef(null);
  const fixed = params.get("token") === null ? null : Number(params.get("token")) - tokens.start;
  const at = over ?? (fixed >= 0 ? fixed : null);
  const values = columns[column] || [];
  const mask = column === "response_mask" ? null : columns.response_mask;
  const strong = strengths(values, mask, kind);
  const place = (event) => {
    const found = event.target.closest?.("[data-at]");
    return found ? Number(found.dataset.at) : null;
  };
  const press = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(tokens.ids.length - 1, (at ?? (move > 0 ? -1 : tokens.ids.length)) + move));
    setOver(null);
    set({ token: tokens.start + next });
  };
  useEffect(() => {
    box.current?.querySelector(".at")?.scrollIntoView({ block: "nearest" });
  }, [fixed]);
  const windowEnd = tokens.start + tokens.ids.length;
  return html`
    <div class="controls">
      <label>Colour <select value=${label} onChange=${(event) => set({ colour: event.target.value })}>${options.map(([name]) => html`<option value=${name}>${name}</option>`)}</select></label>
      ${values.length > 0 && html`<${Scale} values=${values} mask=${mask} kind=${kind} />`}
      <span class="spring"></span>
      ${tokens.total > tokens.ids.length && html`<span>tokens ${tokens.start}–${windowEnd - 1} of ${tokens.total}
        <button type="button" disabled=${tokens.start === 0} onClick=${() => set({ start: Math.max(0, tokens.start - 4000) || null, token: null })}>Earlier</button>
        <button type="button" disabled=${windowEnd >= tokens.total} onClick=${() => set({ start: windowEnd, token: null })}>Later</button></span>`}
    </div>
    <div class="token-view">
      <div class="tokens" ref=${box} tabindex="0" role="group" aria-label="Tokens; arrow keys move from one to the next" onKeyDown=${press}
        onPointerOver=${(event) => setOver(place(event))} onPointerLeave=${() => setOver(null)}
        onClick=${(event) => place(event) !== null && set({ token: tokens.start + place(event) })}>
        ${tokens.ids.map((id, i) => {
          const text = tokens.texts[i] || `${id} `;
          const written = !columns.response_mask || columns.response_mask[i];
          return html`<span data-at=${i} class=${`${i === at ? "at " : ""}${written ? "" : "given"}`} style=${{ background: written || column === "response_mask" ? tint(strong[i]) : undefined }}>${visible(text.replaceAll("\n", "⏎\n"))}</span>`;
        })}
      </div>
      <aside aria-live="polite" aria-label="Values of the token"><${Details} data=${data} at=${at} /></aside>
    </div>
    ${Object.keys(lacking).length > 0 && html`<p class="note">Not in this run: ${Object.entries(lacking).map(([name, why], i) => html`${i ? "; " : ""}<b>${name}</b>, as ${why}`)}.</p>`}`;
}
