// Samples: which of them are wanted, in the address; how they are distributed; a page of them.
import { Choice, Empty, Failure, Text, address, apiAddress, changed, go, html, number, useAnswer, useEffect, useRef, useState } from "./ui.js";
import { Histogram } from "./histogram.js";

const FILTERS = ["text", "step", "score", "length", "source", "finish", "kind", "prompt"];
const SORTS = [["order", "step"], ["score", "score"], ["length", "length"]];
const PAGE = 50;

export function selection(params, run) {
  const chosen = { run };
  for (const name of FILTERS) if (params.get(name)) chosen[name] = params.get(name);
  return chosen;
}

// A value that is passed on once it has been still for a moment, so that not every key asks the server.
function useSettled(value, milliseconds) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), milliseconds);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}

function Several({ title, all, chosen, onChange }) {
  if (all.length < 2 && !chosen.length) return null;
  return html`<fieldset><legend>${title}</legend>
    ${all.map((name) => html`<label class="tick" key=${name}><input type="checkbox" checked=${chosen.includes(name)}
      onChange=${() => onChange((chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]).join())} />
      <${Text}>${name || "(none)"}</${Text}></label>`)}
  </fieldset>`;
}

function Filters({ params, data, set }) {
  const [text, setText] = useState(params.get("text") || "");
  const settled = useSettled(text, 150);
  useEffect(() => setText(params.get("text") || ""), [params.get("text")]);
  useEffect(() => {
    if (settled !== (params.get("text") || "")) set({ text: settled });
  }, [settled]);
  const words = (name) => (params.get(name) || "").split(",").filter(Boolean);
  const any = FILTERS.some((name) => params.get(name));
  return html`<form class="filters" aria-label="Filters" onSubmit=${(event) => event.preventDefault()}>
    <input type="search" data-search placeholder="Text in prompt or response" aria-label="Text in prompt or response" value=${text} onInput=${(event) => setText(event.target.value)} />
    <details open=${matchMedia("(min-width: 761px)").matches}><summary>Filters</summary><div class="more">
    <${Choice} label="Kind" options=${[["", "all"], ["train", "training"], ["val", "validation"]]} value=${params.get("kind") || ""} onChange=${(kind) => set({ kind })} />
    ${data && ["score", "length", "step"].map((name) => html`<${Histogram} key=${name} name=${name} data=${data.histograms[name]} range=${params.get(name) || ""} onChange=${(range) => set({ [name]: range })} />`)}
    ${data && html`<${Several} title="Source" all=${data.sources} chosen=${words("source")} onChange=${(source) => set({ source })} />
      <${Several} title="Ended by" all=${data.finishes} chosen=${words("finish")} onChange=${(finish) => set({ finish })} />`}
    ${params.get("prompt") && html`<p class="note">Answers to one prompt</p>`}
    </div></details>
    ${any && html`<button type="button" onClick=${() => set(Object.fromEntries(FILTERS.map((name) => [name, null])))}>Clear filters</button>`}
  </form>`;
}

function Score({ value, low, high }) {
  const share = high > low ? (value - low) / (high - low) : 1;
  return html`<span class="score"><i style=${{ width: `${Math.max(0, Math.min(1, share)) * 100}%` }}></i><b>${number(value, 3)}</b></span>`;
}

function Row({ row, params, low, high, at, focus }) {
  const own = useRef(null);
  useEffect(() => {
    if (focus) own.current?.focus();
  }, [focus]);
  const open = address("sample", changed(params, { id: row.id }));
  return html`<tr key=${row.id}>
    <td class="n">${row.step}${row.val ? html` <small>val</small>` : ""}</td>
    <td><${Score} value=${row.score} low=${low} high=${high} /></td>
    <td class="n">${row.length}</td>
    <td><span class=${`finish ${row.finish}`}><${Text}>${row.finish}</${Text}></span></td>
    <td class="words"><a ref=${own} href=${open} data-row=${at}><span class="asked"><${Text}>${row.asked}</${Text}></span><span class="answer"><${Text}>${row.response}</${Text}></span></a></td>
  </tr>`;
}

function Sorter({ params, set }) {
  const [by, direction] = [params.get("sort") || "order", params.get("direction") || "down"];
  return SORTS.map(([key, title]) => {
    const sorted = by === key;
    const next = sorted && direction === "down" ? "up" : "down";
    return html`<th scope="col" aria-sort=${sorted ? (direction === "down" ? "descending" : "ascending") : "none"}>
      <button type="button" onClick=${() => set({ sort: key === "order" ? null : key, direction: next === "down" ? null : next })}>${title}<i aria-hidden="true">${sorted ? (direction === "down" ? " ↓" : " ↑") : ""}</i></button></th>`;
  });
}

function useRowKeys(count) {
  const [at, setAt] = useState(-1);
  useEffect(() => {
    const press = (event) => {
      if (event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
      const move = { j: 1, k: -1 }[event.key];
      if (move) setAt((now) => Math.max(0, Math.min(count - 1, now + move)));
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [count]);
  return at;
}

export function Samples({ runs, route }) {
  const { params } = route;
  const run = runs[0];
  const offset = Number(params.get("offset") || 0);
  const set = (changes) => go("samples", changed(params, { offset: null, ...changes }), { replace: true });
  const chosen = selection(params, run.run);
  const { data, error, stale } = useAnswer(
    "samples",
    { ...chosen, sort: params.get("sort") || "order", direction: params.get("direction") || "down", offset, limit: PAGE },
    run.indexed,
  );
  const at = useRowKeys(data?.rows.length || 0);
  const edges = data?.histograms.score.edges || [0, 1];
  return html`<h1 class="unseen">Samples</h1>
    <div class="columns">
      <${Filters} params=${params} data=${data} set=${set} />
      <div class="listed" aria-busy=${stale}>
        <${Failure} error=${error} />
        ${data && html`<div class="summary" role="status">
          <span><strong>${data.matched.toLocaleString("en")}</strong> of ${data.total.toLocaleString("en")} samples</span>
          <span>mean score <strong>${number(data.mean, 3)}</strong></span>
          ${data.indexed < data.files && html`<span class="note">reading ${data.indexed} of ${data.files} files</span>`}
          ${Object.keys(data.damage).length > 0 && html`<a class="warned" href=${address("trust", changed(new URLSearchParams(), { run: run.run }))}>${Object.keys(data.damage).length} damaged</a>`}
          <span class="spring"></span>
          <a download href=${apiAddress("export", { ...chosen, format: "jsonl" })}>Export JSONL</a>
          <a download href=${apiAddress("export", { ...chosen, format: "csv" })}>CSV</a>
        </div>
        ${data.total === 0 && data.indexed === data.files && html`<${Empty}>This run has written no samples${run.state === "running" ? " yet" : ""}: <code>trainer.samples_freq</code> says at which steps it does.</${Empty}>`}
        ${data.total > 0 && !data.matched && html`<${Empty}>No sample meets all of this.</${Empty}>`}
        ${data.rows.length > 0 && html`<table class="samples"><thead><tr>
            <${Sorter} params=${params} set=${set} /><th scope="col">ended by</th><th scope="col">prompt and response</th></tr></thead>
          <tbody>${data.rows.map((row, i) => html`<${Row} row=${row} params=${params} low=${edges[0]} high=${edges.at(-1)} at=${offset + i} focus=${i === at} />`)}</tbody></table>
        <nav class="pager" aria-label="Pages of samples">
          <button type="button" disabled=${offset === 0} onClick=${() => set({ offset: Math.max(0, offset - PAGE) || null })}>Previous</button>
          <span>${(offset + 1).toLocaleString("en")}–${(offset + data.rows.length).toLocaleString("en")}</span>
          <button type="button" disabled=${offset + PAGE >= data.matched} onClick=${() => set({ offset: offset + PAGE })}>Next</button>
        </nav>`}`}
      </div>
    </div>`;
}
