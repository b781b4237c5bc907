// What all pages share: markup, the address as state, answers of the server, numbers and texts as people read them.
import { h, render } from "./vendor/preact.mjs";
import { useEffect, useErrorBoundary, useMemo, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export { render, useEffect, useErrorBoundary, useMemo, useRef, useState };

// ---- the address: #/page?name=value; everything that a page shows follows from it

export function parsed(hash) {
  const [page, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { page: page || "overview", params: new URLSearchParams(query) };
}

export function address(page, params) {
  const query = params.toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

// The parameters with some changed: null or "" removes one, a list sets it several times.
export function changed(params, changes) {
  const next = new URLSearchParams(params);
  for (const [name, value] of Object.entries(changes)) {
    next.delete(name);
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") next.append(name, each);
    }
  }
  return next;
}

export function go(page, params, { replace = false } = {}) {
  const hash = address(page, params);
  if (replace) history.replaceState(null, "", hash);
  else history.pushState(null, "", hash);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

// Parameters that say which runs are looked at: they stay from page to page.
export function ofRuns(params) {
  return changed(new URLSearchParams(), { run: params.getAll("run") });
}

// ---- the server

export function apiAddress(name, params) {
  return `api/${name}?${new URLSearchParams(params)}`;
}

export async function ask(name, params, signal) {
  const answer = await fetch(apiAddress(name, params), { signal });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

// The answer to a question, asked again whenever the question or `stamp` changes; what was there stays meanwhile.
export function useAnswer(name, params, stamp = "") {
  const question = params && apiAddress(name, params);
  const [state, setState] = useState({ data: null, error: "", asked: "" });
  useEffect(() => {
    if (!question) return undefined;
    const control = new AbortController();
    ask(name, params, control.signal).then(
      (data) => setState({ data, error: "", asked: question }),
      (error) => {
        if (error.name !== "AbortError") setState({ data: null, error: error.message, asked: question });
      },
    );
    return () => control.abort();
  }, [question, JSON.stringify(stamp)]);
  return { ...state, stale: state.asked !== question };
}

// What keys do while nothing is typed. A key acts on what is drawn, even before the effects of that drawing have run.
export function useKeys(act) {
  const drawn = useRef(act);
  drawn.current = act;
  useEffect(() => {
    const press = (event) => {
      const typed = event.target.closest?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
      if (!typed) drawn.current(event.key, event);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, []);
}

// ---- numbers

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return escaped(String(value).slice(0, 40));
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value >= 100) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value >= 1 ? `${value.toPrecision(3)} s` : `${number(value * 1000, 3)} ms`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 10 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

// ---- texts of a run may hold anything. Markup is never made of them; what cannot be seen is shown by its name.

const HIDDEN = new RegExp(
  [
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f]", // C0 but tab and line feed, C1
    "[\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f]", // directions, no width
    "[\\ufe00-\\ufe0f\\ufeff\\ufff9-\\ufffb]|\\udb40[\\udc00-\\udc7f]", // variants, annotations, tags
    "[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", // halves of characters
  ].join("|"),
  "g",
);

function named(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// The text with such characters by name, where it can hold no markup of ours.
export const escaped = (text) => text.replace(HIDDEN, named);

export function visible(text) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > at) found.push(text.slice(at, match.index));
    found.push(html`<span class="hidden-character">${named(match[0])}</span>`);
    at = match.index + match[0].length;
  }
  found.push(text.slice(at));
  return found;
}

export function Text({ children, block = false }) {
  const text = String(children ?? "");
  return block ? html`<pre class="text" dir="ltr">${visible(text)}</pre>` : html`<bdi dir="ltr">${visible(text)}</bdi>`;
}

// ---- small parts

export function Failure({ error }) {
  return error ? html`<p class="failure" role="alert"><${Text} block>${error}</${Text}></p>` : null;
}

// What is below, or why it cannot be shown: a run folder may hold what nobody thought of.
export function Guarded({ children }) {
  const [error] = useErrorBoundary();
  return error ? html`<${Failure} error=${`This cannot be shown: ${error.message}`} />` : children;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function Section({ title, note, children, id }) {
  return html`<section aria-labelledby=${id}>
    <header class="section-head"><h2 id=${id}>${title}</h2>${note && html`<span class="note">${note}</span>`}</header>
    ${children}
  </section>`;
}

// A table. Titles may be [title, class of the column]; the first cell of a row is its head.
export function Table({ head, rows, kind = "", label }) {
  const titles = head.map((title) => (Array.isArray(title) ? title : [title, ""]));
  return html`<table class=${kind} aria-label=${label}>
    <thead><tr>${titles.map(([title, column]) => html`<th scope="col" class=${column}>${title}</th>`)}</tr></thead>
    <tbody>
      ${rows.map(
        ([first, ...rest]) => html`<tr>
          <th scope="row" class=${titles[0][1]}>${first}</th>
          ${rest.map((cell, i) => html`<td class=${titles[i + 1][1]}>${cell}</td>`)}
        </tr>`,
      )}
    </tbody>
  </table>`;
}

// Names and what each of them is.
export function Pairs({ pairs, kind = "plain" }) {
  return html`<dl class=${kind}>${pairs.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export const text = (value, block = false) => html`<${Text} block=${block}>${value}</${Text}>`;

// Buttons of which one is pressed.
export function Choice({ label, options, value, onChange }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${options.map(
      ([key, text]) =>
        html`<button type="button" aria-pressed=${key === value} onClick=${() => onChange(key)}>${text}</button>`,
    )}
  </div>`;
}

// ---- colours, which canvas wants resolved

export function ink(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

export const RUN_INKS = ["run-0", "run-1", "run-2", "run-3", "run-4", "run-5", "run-6", "run-7"];
export const runInk = (position) => RUN_INKS[position % RUN_INKS.length];
