// One sample: its conversation, score and reason, tokens, group, and other responses to its prompt over the run.
import { Chart } from "./chart.js";
import { Tokens } from "./tokens.js";
import { Failure, Pager, Pairs, Section, address, changed, html, number, text, useAnswer, useKeys } from "./ui.js";

const SHOWN_ELSEWHERE = ["reward_why", "ground_truth", "reward_extra"];
// Parameters to clear when the sample changes (OWN), and when this page is left (OF_ONE).
const OWN = { token: null, start: null, group: null };
export const OF_ONE = { id: null, colour: null, ...OWN };

function Turn({ role, text: content, more }) {
  return html`<li class=${`turn ${role}`}>
    <span class="role">${text(role)}</span>
    <div>${text(content, true)}${more && text(more, true)}</div>
  </li>`;
}

function extras(json) {
  try {
    return Object.entries(JSON.parse(json || "{}") || {});
  } catch {
    return [["reward_extra", json]];
  }
}

function Scored({ data }) {
  const { facts } = data;
  const shown = (value) => (typeof value === "number" ? number(value) : JSON.stringify(value));
  const silent = html`<span class="note">the reward function returned no reason (<code>why</code>)</span>`;
  const pairs = [
    ["why", facts.reward_why ? text(facts.reward_why, true) : silent],
    ...((facts.ground_truth ?? null) !== null ? [["truth", text(facts.ground_truth, true)]] : []),
    ...extras(facts.reward_extra).map(([name, value]) => [text(name), text(shown(value))]),
  ];
  const rest = Object.entries(facts).filter(([name, value]) => !SHOWN_ELSEWHERE.includes(name) && value !== null && value !== "");
  return html`<div class="scored">
      <div class="big-score"><b>${number(data.score)}</b><span>score</span></div>
      <${Pairs} pairs=${pairs} />
    </div>
    <details>
      <summary>All columns</summary>
      <${Pairs} pairs=${rest.map(([name, value]) => [text(name), text(String(value).slice(0, 2000))])} />
    </details>`;
}

function Group({ data, params, set }) {
  const scores = data.group.map((row) => row.score);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const rank = (score) => (high === low ? "" : score === high ? "best" : score === low ? "worst" : "");
  const { group_start: first, group_total: total } = data;
  const size = data.group.length;
  const last = first + size;
  return html`${total > size &&
  html`<${Pager} label="Pages of the group" titles=${["← Earlier", "Later →"]} step=${size} ...${{ first, last, total }}
    onTurn=${(group) => set({ group })}>${`responses ${first + 1} – ${last} of ${total.toLocaleString("en")}`}</${Pager}>`}
  <div class="side-by-side" tabindex="0" role="region" aria-label="The group's responses">
    ${data.group.map(
      (row, i) => html`<a class="card answer" key=${row.id} href=${address("sample", changed(params, { ...OWN, id: row.id }))}
        aria-current=${row.id === data.id ? "true" : undefined}>
        <header>
          <span>#${first + i}</span><b class=${rank(row.score)}>${number(row.score, 3)}</b>
          <small>${row.length} tokens · ${text(row.finish)}</small>
        </header>
        ${text(row.response, true)}
      </a>`,
    )}
  </div>`;
}

function History({ run, data, params, theme }) {
  const { data: found, error } = useAnswer("history", { run: run.run, prompt: data.prompt }, run.indexed);
  if (!found) return html`<${Failure} error=${error} />`;
  const scores = new Map();
  for (const [step, score] of found.points) scores.set(step, [...(scores.get(step) || []), score]);
  const steps = [...scores.keys()].sort((a, b) => a - b);
  const values = steps.map((step) => scores.get(step).reduce((a, b) => a + b, 0) / scores.get(step).length);
  const curves = [{ name: "mean score", steps, values }];
  return html`
    ${steps.length > 1 &&
    html`<div class="card"><${Chart} title="Mean score of this prompt" curves=${curves} theme=${theme} height=${110} /></div>`}
    <ol class="history">
      ${found.rows.map(
        (row) => html`<li key=${row.id} class=${row.id === data.id ? "this" : ""}>
          <span class="n">step ${row.step}${row.val ? " val" : ""}</span>
          <b class="n">${number(row.score, 3)}</b>
          <a href=${address("sample", changed(params, { ...OWN, id: row.id }))}>${text(row.response || "(empty)")}</a>
        </li>`,
      )}
    </ol>`;
}

export function Sample({ run, params, set, theme }) {
  const [id, start, group] = [params.get("id") || "", Number(params.get("start") || 0), params.get("group") || ""];
  const { data, error } = useAnswer("sample", { run: run.run, id, start, group }, run.indexed);
  useKeys((key) => {
    const move = { j: 1, k: -1 }[key];
    const at = data?.group.findIndex((row) => row.id === data.id) ?? -1;
    const next = move && at >= 0 && data.group[at + move];
    if (next) set({ ...OWN, id: next.id });
  });
  if (!data) return html`<h1 class="unseen">Sample</h1><${Failure} error=${error} />`;
  const answered = data.answered.length ? data.answered : [{ role: "assistant", text: data.response, more: "" }];
  const undecoded = "the model's tokenizer.json is not on this machine, so token ids are shown";
  return html`<div class="sample">
    <p class="trail"><a href=${address("samples", changed(params, OF_ONE))}>← Samples</a></p>
    <h1>
      ${`Step ${data.step}${data.val ? " · validation" : ""} `}
      <small>${text(data.uid)} · ${data.length} tokens · ${text(data.finish)}</small>
    </h1>
    <div class="halves">
      <${Section} id="chat" title="Conversation">
        <ol class="turns">${[...data.turns, ...answered].map((turn) => html`<${Turn} ...${turn} />`)}</ol>
        ${data.characters > data.response.length &&
        html`<p class="note">The response has ${data.characters.toLocaleString("en")} characters; the export has all.</p>`}
      </${Section}>
      <${Section} id="scored" title="Score"><${Scored} data=${data} /></${Section}>
    </div>
    <${Section} id="tokens" title="Tokens" note=${data.decoded ? "" : undecoded}>
      <${Tokens} data=${data} params=${params} set=${set} />
    </${Section}>
    <${Section} id="group" title="The prompt's group" note=${`${data.group_total.toLocaleString("en")} responses`}>
      <${Group} data=${data} params=${params} set=${set} />
    </${Section}>
    <${Section} id="history" title="This prompt over the run">
      <${History} run=${run} data=${data} params=${params} theme=${theme} />
    </${Section}>
  </div>`;
}
