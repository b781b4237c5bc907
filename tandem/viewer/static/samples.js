// Samples: filters (kept in the address), histograms, and a list with pages.
import { Histogram } from "./histogram.js";
import {
  Choice, Empty, Failure, Pager, Search, address, apiAddress, changed, html, number, text, toggled, useAnswer, useEffect,
  useKeys, useRef, useState,
} from "./ui.js";

const FILTERS = ["text", "step", "score", "length", "source", "finish", "kind", "prompt"];
const SORTS = [["order", "step"], ["score", "score"], ["length", "length"]];
const KINDS = [["", "all"], ["train", "training"], ["val", "validation"]];
const PAGE = 50;
const SETTLE_MS = 150;

// Returns the filters as names and values, as the server takes them.
function selection(params, run) {
  return [["run", run], ...FILTERS.flatMap((name) => params.getAll(name).map((value) => [name, value]))];
}

// A search field that shows typed text at once, and searches when no key has been pressed for a while. It takes the
// address's text only if something else changed it, so that a search never undoes what was typed since it began.
function Words({ value, set }) {
  const [typed, setTyped] = useState(value);
  const searched = useRef(value);
  useEffect(() => {
    if (value !== searched.current) setTyped(value);
    searched.current = value;
  }, [value]);
  useEffect(() => {
    if (typed === value) return undefined;
    const timer = setTimeout(() => {
      searched.current = typed;
      set({ text: typed });
    }, SETTLE_MS);
    return () => clearTimeout(timer);
  });
  return html`<${Search} data-search name="Text in prompt or response" value=${typed} onType=${setTyped} />`;
}

function Several({ title, all, chosen, onChange }) {
  if (all.length < 2 && !chosen.length) return null;
  return html`<fieldset>
    <legend>${title}</legend>
    ${all.map(
      (name) => html`<label class="tick" key=${name}>
        <input type="checkbox" checked=${chosen.includes(name)} onChange=${() => onChange(toggled(chosen, name))} />
        ${text(name || "(none)")}
      </label>`,
    )}
  </fieldset>`;
}

function Filters({ params, data, set }) {
  const own = (name) => ({ range: params.get(name) || "", onChange: (range) => set({ [name]: range }) });
  const several = (name) => ({ chosen: params.getAll(name), onChange: (chosen) => set({ [name]: chosen }) });
  const clear = () => set(Object.fromEntries(FILTERS.map((name) => [name, null])));
  return html`<form class="filters" aria-label="Filters" onSubmit=${(event) => event.preventDefault()}>
    <${Words} value=${params.get("text") || ""} set=${set} />
    <details open=${matchMedia("(min-width: 761px)").matches}>
      <summary>Filters</summary>
      <div class="more">
        <${Choice} label="Kind" options=${KINDS} value=${params.get("kind") || ""} onChange=${(kind) => set({ kind })} />
        ${data &&
        html`${["score", "length", "step"].map(
            (name) => html`<${Histogram} key=${name} name=${name} data=${data.histograms[name]} ...${own(name)} />`,
          )}
          <${Several} title="Source" all=${data.sources} ...${several("source")} />
          <${Several} title="Ended by" all=${data.finishes} ...${several("finish")} />`}
        ${params.get("prompt") && html`<p class="note">Responses to one prompt only</p>`}
      </div>
    </details>
    ${FILTERS.some((name) => params.get(name)) && html`<button type="button" onClick=${clear}>Clear filters</button>`}
  </form>`;
}

function Score({ value, low, high }) {
  const share = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 1;
  return html`<span class="score"><i style=${{ width: `${share * 100}%` }}></i><b>${number(value, 3)}</b></span>`;
}

function Row({ row, params, edges, at, focus }) {
  const own = useRef(null);
  useEffect(() => {
    if (focus) own.current?.focus();
  }, [focus]);
  return html`<tr>
    <td class="n">${row.step}${row.val ? html` <small>val</small>` : ""}</td>
    <td><${Score} value=${row.score} low=${edges[0]} high=${edges.at(-1)} /></td>
    <td class="n">${row.length}</td>
    <td><span class=${`finish ${row.finish === "length" ? "cut" : ""}`}>${text(row.finish)}</span></td>
    <td class="words">
      <a ref=${own} href=${address("sample", changed(params, { id: row.id }))} data-row=${at}>
        <span class="asked">${text(row.asked)}</span><span class="answer">${text(row.response)}</span>
      </a>
    </td>
  </tr>`;
}

function Sorter({ params, set }) {
  const [by, direction] = [params.get("sort") || "order", params.get("direction") || "down"];
  return SORTS.map(([key, title]) => {
    const sorted = by === key && { down: "descending", up: "ascending" }[direction];
    const next = { sort: key === "order" ? null : key, direction: sorted === "descending" ? "up" : null };
    const arrow = { descending: " ↓", ascending: " ↑" }[sorted];
    return html`<th scope="col" aria-sort=${sorted || "none"}>
      <button type="button" class="bare" onClick=${() => set(next)}>${title}<i aria-hidden="true">${arrow}</i></button>
    </th>`;
  });
}

function Summary({ data, run, chosen }) {
  const damaged = Object.keys(data.damage).length;
  const file = (format) => apiAddress("export", [...chosen, ["format", format]]);
  return html`<div class="summary" role="status">
    <span><strong>${data.matched.toLocaleString("en")}</strong>${` of ${data.total.toLocaleString("en")} samples`}</span>
    <span>mean score <strong>${number(data.mean, 3)}</strong></span>
    ${data.indexed < data.files && html`<span class="note">reading ${data.indexed} of ${data.files} files</span>`}
    ${damaged > 0 &&
    html`<a class="warned" href=${address("trust", new URLSearchParams({ run: run.run }))}>${damaged} damaged</a>`}
    <span class="spring"></span>
    <a download href=${file("jsonl")}>Export JSONL</a>
    <a download href=${file("csv")}>CSV</a>
  </div>`;
}

function List({ data, params, set, first, at }) {
  const edges = data.histograms.score.edges;
  const last = first + data.rows.length;
  const [from, to] = [first + 1, last].map((place) => place.toLocaleString("en"));
  return html`<table class="samples">
      <thead>
        <tr>
          <${Sorter} params=${params} set=${set} />
          <th scope="col">ended by</th>
          <th scope="col">prompt and response</th>
        </tr>
      </thead>
      <tbody>
        ${data.rows.map(
          (row, i) => html`<${Row} key=${row.id} ...${{ row, params, edges, at: first + i, focus: i === at }} />`,
        )}
      </tbody>
    </table>
    <${Pager} label="Pages of samples" step=${PAGE} ...${{ first, last, total: data.matched }}
      onTurn=${(offset) => set({ offset: offset || null })}>${from}–${to}</${Pager}>`;
}

export function Samples({ run, params, set }) {
  const offset = Number(params.get("offset") || 0);
  const choose = (changes) => set({ offset: null, ...changes });
  const chosen = selection(params, run.run);
  const order = { sort: params.get("sort") || "order", direction: params.get("direction") || "down" };
  const question = [...chosen, ...Object.entries({ ...order, offset, limit: PAGE })];
  const { data, error, stale } = useAnswer("samples", question, run.indexed);
  const [at, setAt] = useState(-1);
  useKeys((key) => {
    const move = { j: 1, k: -1 }[key];
    if (move) setAt((now) => Math.max(0, Math.min((data?.rows.length || 1) - 1, now + move)));
  });
  const unwritten = `This run has written no samples${run.state === "running" ? " yet" : ""}. `;
  return html`<div class="columns">
    <${Filters} params=${params} data=${data} set=${choose} />
    <div class="listed" aria-busy=${stale}>
      <${Failure} error=${error} />
      ${data &&
      html`<${Summary} data=${data} run=${run} chosen=${chosen} />
        ${data.total === 0 &&
        data.indexed === data.files &&
        html`<${Empty}>${unwritten}<code>trainer.samples_freq</code> sets how often samples are written.</${Empty}>`}
        ${data.total > 0 && !data.matched && html`<${Empty}>No sample matches all filters.</${Empty}>`}
        ${data.rows.length > 0 && html`<${List} data=${data} params=${params} set=${choose} first=${offset} at=${at} />`}`}
    </div>
  </div>`;
}
