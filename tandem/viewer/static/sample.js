// One sample: what was asked and answered, why it was scored so, its tokens, its group, the same prompt over the run.
import { Chart } from "./chart.js";
import { Tokens } from "./tokens.js";
import { Failure, Section, Text, address, changed, go, html, number, useAnswer, useEffect, useState } from "./ui.js";

const SAID_ELSEWHERE = ["response_text", "scores", "reward_why", "token_fingerprint"];

function Turn({ role, text, more }) {
  return html`<li class=${`turn ${role}`}><span class="role"><${Text}>${role}</${Text}></span><div><${Text} block>${text}</${Text}>
    ${more && html`<${Text} block>${more}</${Text}>`}</div></li>`;
}

function Scored({ data }) {
  const { facts } = data;
  let extra = {};
  try {
    extra = JSON.parse(facts.reward_extra || "{}") || {};
  } catch {
    extra = { reward_extra: facts.reward_extra };
  }
  return html`<div class="scored">
    <div class="big-score"><b>${number(data.score)}</b><span>score</span></div>
    <dl>
      ${facts.reward_why ? html`<div><dt>why</dt><dd><${Text} block>${facts.reward_why}</${Text}></dd></div>` : html`<div><dt>why</dt><dd class="note">the reward gave no reason (<code>why</code> beside <code>score</code>)</dd></div>`}
      ${facts.ground_truth !== undefined && facts.ground_truth !== null && html`<div><dt>truth</dt><dd><${Text} block>${facts.ground_truth}</${Text}></dd></div>`}
      ${Object.entries(extra).map(([name, value]) => html`<div><dt><${Text}>${name}</${Text}></dt><dd><${Text}>${typeof value === "number" ? number(value) : JSON.stringify(value)}</${Text}></dd></div>`)}
    </dl>
  </div>`;
}

function Group({ data, params }) {
  const [low, high] = data.group.reduce(([a, b], row) => [Math.min(a, row.score ?? a), Math.max(b, row.score ?? b)], [Infinity, -Infinity]);
  return html`<div class="side-by-side" tabindex="0" role="region" aria-label="The group's answers">
    ${data.group.map((row, i) => html`<a class="card answer" key=${row.id} href=${address("sample", changed(params, { id: row.id, token: null, start: null }))}
        aria-current=${row.id === data.id ? "true" : undefined}>
      <header><span>#${i}</span><b class=${high > low ? (row.score === high ? "best" : row.score === low ? "worst" : "") : ""}>${number(row.score, 3)}</b>
        <small>${row.length} tokens · <${Text}>${row.finish}</${Text}></small></header>
      <${Text} block>${row.response}</${Text}></a>`)}
  </div>`;
}

function History({ run, data, params, theme }) {
  const { data: found, error } = useAnswer("history", { run: run.run, prompt: data.prompt }, run.indexed);
  if (!found) return html`<${Failure} error=${error} />`;
  const by = new Map();
  for (const [step, score] of found.points) by.set(step, [...(by.get(step) || []), score]);
  const steps = [...by.keys()].sort((a, b) => a - b);
  const mean = steps.map((step) => by.get(step).reduce((a, b) => a + b, 0) / by.get(step).length);
  return html`
    ${steps.length > 1 && html`<div class="card"><${Chart} title="Mean score of this prompt" curves=${[{ name: "mean score", steps, values: mean }]} theme=${theme} height=${110} /></div>`}
    <ol class="history">${found.rows.map((row) => html`<li key=${row.id} class=${row.id === data.id ? "this" : ""}>
      <span class="n">step ${row.step}${row.val ? " val" : ""}</span><b class="n">${number(row.score, 3)}</b>
      <a href=${address("sample", changed(params, { id: row.id, token: null, start: null }))}><${Text}>${row.response || "(empty)"}</${Text}></a></li>`)}</ol>`;
}

function useNeighbours(data, params) {
  useEffect(() => {
    const press = (event) => {
      const move = { j: 1, k: -1 }[event.key];
      if (!move || !data || event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
      const next = data.group[data.group.findIndex((row) => row.id === data.id) + move];
      if (next) go("sample", changed(params, { id: next.id, token: null, start: null }), { replace: true });
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [data, params.toString()]);
}

export function Sample({ runs, route, theme }) {
  const { params } = route;
  const run = runs[0];
  const start = Number(params.get("start") || 0);
  const { data, error } = useAnswer("sample", { run: run.run, id: params.get("id") || "", start }, run.indexed);
  const [raw, setRaw] = useState(false);
  const set = (changes) => go("sample", changed(params, changes), { replace: true });
  useNeighbours(data, params);
  if (!data) return html`<h1 class="unseen">Sample</h1><${Failure} error=${error} />`;
  const facts = Object.entries(data.facts).filter(([name, value]) => !SAID_ELSEWHERE.includes(name) && value !== null && value !== "");
  const answered = data.answered.length ? data.answered : [{ role: "assistant", text: data.response, more: "" }];
  return html`<div class="sample">
    <p class="trail"><a href=${address("samples", changed(params, { id: null, token: null, colour: null, start: null }))}>← Samples</a></p>
    <h1>Step ${data.step}${data.val ? " · validation" : ""} <small><${Text}>${data.uid}</${Text}> · ${data.length} tokens · <${Text}>${data.finish}</${Text}></small></h1>
    <div class="halves">
      <${Section} id="chat" title="Conversation">
        <ol class="turns">${[...data.turns, ...answered].map((turn) => html`<${Turn} ...${turn} />`)}</ol>
        ${data.characters > 50000 && html`<p class="note">The response has ${data.characters.toLocaleString("en")} characters; the export has them all.</p>`}
      </${Section}>
      <${Section} id="scored" title="Score"><${Scored} data=${data} />
        <details open=${raw} onToggle=${(event) => setRaw(event.target.open)}><summary>All columns</summary>
          <dl class="plain">${facts.map(([name, value]) => html`<div><dt><${Text}>${name}</${Text}></dt><dd><${Text}>${String(value).slice(0, 2000)}</${Text}></dd></div>`)}</dl></details>
      </${Section}>
    </div>
    <${Section} id="tokens" title="Tokens" note=${data.decoded ? "" : "the model's tokenizer.json is not on this machine: ids stand for texts"}>
      <${Tokens} data=${data} params=${params} set=${set} theme=${theme} />
    </${Section}>
    <${Section} id="group" title="The prompt's group" note=${data.group.length === 1 ? "one answer" : `${data.group.length} answers`}><${Group} data=${data} params=${params} /></${Section}>
    <${Section} id="history" title="This prompt over the run"><${History} run=${run} data=${data} params=${params} theme=${theme} /></${Section}>
  </div>`;
}
