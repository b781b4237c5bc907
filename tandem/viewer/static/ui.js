// Helpers for all pages: markup, the address as state, requests to the server, formatted numbers and texts.
import { h, render } from "./vendor/preact.mjs";
import { useEffect, useErrorBoundary, useMemo, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export { render, useEffect, useErrorBoundary, useMemo, useRef, useState };

// ---- the address, #/page?name=value. It determines everything that a page shows.

export function parsed(hash) {
  const [page, query = ""] = hash.replace(/^#\/?/, "").split("?");
  return { page: page || "overview", params: new URLSearchParams(query) };
}

export function address(page, params) {
  const query = params.toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

// Returns the list with an element added, or removed if it was there.
export const toggled = (all, one) => (all.includes(one) ? all.filter((each) => each !== one) : [...all, one]);

// Returns the parameters with some of them changed. null or "" removes a parameter, a list sets it several times.
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

// Returns the parameters that name the chosen runs. They are kept from page to page.
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

// Asks several questions of one kind and returns the answers, each with its parameters. The questions are asked again
// whenever one of them or `stamp` changes; the old answers stay meanwhile. Failed questions are left out, and `error`
// is the message of the first one.
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

// Asks one question and returns the answer. Without `params`, nothing is asked.
export function useAnswer(name, params, stamp) {
  const { found, error, stale } = useAnswers(name, params ? [params] : [], stamp);
  return { data: found[0]?.answer ?? null, error, stale };
}

// Listens to events of the window. The listener is always that of the last render, even before its effects have run.
export function useListener(kinds, listener) {
  const drawn = useRef(listener);
  drawn.current = listener;
  useEffect(() => {
    const listen = (event) => drawn.current(event);
    for (const kind of kinds) window.addEventListener(kind, listen);
    return () => kinds.forEach((kind) => window.removeEventListener(kind, listen));
  }, []);
}

// Calls `act` for keys that are pressed outside of a text field.
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

// ---- texts of a run, which may contain anything. They never become markup. Invisible characters are shown by name.

// Control characters except tab and line feed, lone surrogates, line separators, and characters that may be invisible.
const HIDDEN = /[[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\ufff9-\ufffb]--[\t\n]]/gv;

function named(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// Returns the text with invisible characters replaced by names, for places that cannot contain markup.
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

// Returns a run's text for the page. Texts of a run must not enter the page in any other way.
export const text = (value, block = false) => {
  const shown = visible(String(value ?? ""));
  return block ? html`<pre class="text" dir="ltr">${shown}</pre>` : html`<bdi dir="ltr">${shown}</bdi>`;
};

// ---- small parts

export function Failure({ error }) {
  return error ? html`<p class="failure" role="alert">${text(error, true)}</p>` : null;
}

// Shows the children, or the error if they cannot be drawn, because a run folder may contain anything.
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

// A table. A title may be [title, class of the column]. The first cell of a row is its heading.
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

// A list of names and values.
export function Pairs({ pairs, kind = "plain" }) {
  return html`<dl class=${kind}>${pairs.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

// A search field. It calls `onType` at every letter.
export function Search({ name, hint = name, value, onType, ...more }) {
  return html`<input type="search" placeholder=${hint} aria-label=${name} value=${value}
    onInput=${(event) => onType(event.target.value)} ...${more} />`;
}

// Buttons for the previous and the next part. Between them stands the shown range.
export function Pager({ label, titles = ["Previous", "Next"], first, last, total, step, onTurn, children }) {
  return html`<nav class="pager" aria-label=${label}>
    <button type="button" disabled=${first === 0} onClick=${() => onTurn(Math.max(0, first - step))}>${titles[0]}</button>
    <span>${children}</span>
    <button type="button" disabled=${last >= total} onClick=${() => onTurn(last)}>${titles[1]}</button>
  </nav>`;
}

// A group of buttons. One of them is pressed.
export function Choice({ label, options, value, onChange }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${options.map(
      ([key, text]) =>
        html`<button type="button" aria-pressed=${key === value} onClick=${() => onChange(key)}>${text}</button>`,
    )}
  </div>`;
}

// ---- colours, resolved because a canvas cannot use variables

export function ink(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

export const runInk = (position) => `run-${position % 8}`;
