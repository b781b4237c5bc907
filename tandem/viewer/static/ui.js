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

// A list with one more in it, or one less.
export const toggled = (all, one) => (all.includes(one) ? all.filter((each) => each !== one) : [...all, one]);

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

// Answers to some questions of one kind, each with its parameters: asked again whenever a question or `stamp` changes; what
// was there stays meanwhile. Those that fail are left out, and `error` says why the first of these does.
export function useAnswers(name, questions, stamp = "") {
  const [state, setState] = useState({ found: [], error: "", asked: "" });
  const wanted = questions.map((params) => apiAddress(name, params)).join();
  useEffect(() => {
    if (!questions.length) return undefined;
    const control = new AbortController();
    Promise.allSettled(questions.map((params) => ask(name, params, control.signal))).then((all) => {
      const found = all.flatMap(({ value }, i) => (value ? [{ params: questions[i], answer: value }] : []));
      const failed = all.find(({ reason }) => reason);
      if (!control.signal.aborted) setState({ found, error: failed?.reason.message || "", asked: wanted });
    });
    return () => control.abort();
  }, [wanted, JSON.stringify(stamp)]);
  return { ...state, stale: state.asked !== wanted };
}

// The answer to one question; without `params` nothing is asked.
export function useAnswer(name, params, stamp) {
  const { found, error, stale } = useAnswers(name, params ? [params] : [], stamp);
  return { data: found[0]?.answer ?? null, error, stale };
}

// Hears events of the window. What hears is that of the last drawing, even before the effects of that drawing have run.
export function useListener(kinds, hear) {
  const drawn = useRef(hear);
  drawn.current = hear;
  useEffect(() => {
    const listen = (event) => drawn.current(event);
    for (const kind of kinds) window.addEventListener(kind, listen);
    return () => kinds.forEach((kind) => window.removeEventListener(kind, listen));
  }, []);
}

// What keys do while nothing is typed.
export function useKeys(act) {
  useListener(["keydown"], (event) => {
    const typed = event.target.closest?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
    if (!typed) act(event.key, event);
  });
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

// Controls but tab and line feed, halves of characters, separators of lines, and what Unicode lets a font draw as nothing.
const HIDDEN = /[[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\ufff9-\ufffb]--[\t\n]]/gv;

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

// The one way of a run's text into the page.
export const text = (value, block = false) => {
  const shown = visible(String(value ?? ""));
  return block ? html`<pre class="text" dir="ltr">${shown}</pre>` : html`<bdi dir="ltr">${shown}</bdi>`;
};

// ---- small parts

export function Failure({ error }) {
  return error ? html`<p class="failure" role="alert">${text(error, true)}</p>` : null;
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
export function Table({ head, rows, kind = "" }) {
  const titles = head.map((title) => (Array.isArray(title) ? title : [title, ""]));
  return html`<table class=${kind}>
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

// A field that finds: hears every letter that is typed.
export function Search({ name, hint = name, value, onType, ...more }) {
  return html`<input type="search" placeholder=${hint} aria-label=${name} value=${value}
    onInput=${(event) => onType(event.target.value)} ...${more} />`;
}

// Buttons to what comes before and after, and between them what is shown of how much.
export function Pager({ label, titles = ["Previous", "Next"], first, last, total, step, onTurn, children }) {
  return html`<nav class="pager" aria-label=${label}>
    <button type="button" disabled=${first === 0} onClick=${() => onTurn(Math.max(0, first - step))}>${titles[0]}</button>
    <span>${children}</span>
    <button type="button" disabled=${last >= total} onClick=${() => onTurn(last)}>${titles[1]}</button>
  </nav>`;
}

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

export const runInk = (position) => `run-${position % 8}`;
