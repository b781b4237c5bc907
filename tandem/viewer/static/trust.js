// Trust: whether rollout and training agree, with which weights samples were written, what went wrong and when.
import { Chart } from "./chart.js";
import { marksOf } from "./overview.js";
import { Empty, Failure, Section, Text, address, changed, html, number, useAnswer, useState } from "./ui.js";

const NAMES = ["rollout/log_prob_diff_mean", "rollout/log_prob_diff_max", "rollout/log_prob_diff_limit", "rollout/prob_pearson", "rollout/version_lag", "rollout/changed_samples", "reward/failed", "rollout/untruncated_missing"];
const MARKED = /warning|differ|fail|error|stall|hang|limit|resumed|restart|killed|lost|refus|remedy/i;

function last(curves, name) {
  return curves?.[name]?.[1].at(-1);
}

function highest(curves, name) {
  const values = curves?.[name]?.[1];
  return values?.length ? values.reduce((a, b) => Math.max(a, b)) : undefined;
}

function Verdict({ title, state, value, children }) {
  return html`<article class=${`verdict ${state}`}><h3>${title}</h3><b>${value}</b><p>${children}</p></article>`;
}

function verdicts(curves, found) {
  const [diff, limit] = [highest(curves, "rollout/log_prob_diff_mean"), last(curves, "rollout/log_prob_diff_limit")];
  const lag = highest(curves, "rollout/version_lag");
  const changedSamples = highest(curves, "rollout/changed_samples");
  const failed = curves?.["reward/failed"] && highest(curves, "reward/failed");
  const warnings = found.events.filter((event) => event.event === "warning");
  const ends = found.events.filter((event) => event.event === "end" && event.how === "failed");
  const starts = found.events.filter((event) => event.event === "start");
  const over = diff !== undefined && limit !== undefined && diff > limit;
  return [
    ["Rollout and training", diff === undefined ? "none" : over ? "bad" : "good", diff === undefined ? "not measured" : `${number(diff, 3)} nats`,
      diff === undefined ? "No step of this run compared the log-probs." : `the greatest mean difference of a step; ${over ? "over" : "within"} the limit of ${number(limit, 3)}`],
    ["Weights", lag ? "bad" : lag === undefined ? "none" : "good", lag === undefined ? "not recorded" : `${number(lag)} updates behind`,
      "the oldest weights that wrote a token. Digests are compared at each transfer of weights; one that differs ends the run."],
    ["Tokens", changedSamples ? "bad" : changedSamples === undefined ? "none" : "good", changedSamples === undefined ? "not recorded" : `${number(changedSamples)} changed`, "samples whose tokens training saw otherwise than the engine wrote them"],
    ["Rewards", failed ? "bad" : "good", failed ? `${number(failed)} failed` : "none failed", "calls of the reward function that raised, crashed or took too long, in the worst step"],
    ["Starts", ends.length ? "bad" : starts.length > 1 ? "fair" : "good", `${starts.length}`, `${Math.max(starts.length - 1, 0)} restarts, ${ends.length} ends in failure`],
    ["Warnings", warnings.length ? "fair" : "good", `${warnings.length}`, "of learning that goes wrong, each fault once"],
  ];
}

function when(time) {
  return String(time || "").replace("T", " ");
}

function Told({ events }) {
  if (!events.length) return html`<${Empty}>Nothing is recorded (events.jsonl).</${Empty}>`;
  const text = (event) => (event.event === "start" ? `started after step ${event.step}` : event.event === "end" ? `ended: ${event.how}` : event.text || "");
  return html`<ol class="events">${events.map((event) => html`<li class=${`event ${event.event} ${event.how || ""}`}>
    <time>${when(event.time)}</time><span class="kind"><${Text}>${event.event}</${Text}></span>
    <span>${event.name && html`<b><${Text}>${event.name}</${Text}></b> after step ${event.step}: `}<${Text}>${text(event)}</${Text}></span></li>`)}</ol>`;
}

function Log({ log }) {
  const [all, setAll] = useState(false);
  const lines = log.split("\n").filter(Boolean);
  const shown = (all ? lines : lines.filter((line) => MARKED.test(line))).slice(-300);
  return html`<label class="tick"><input type="checkbox" checked=${all} onChange=${() => setAll(!all)} /> All lines of log/run.log, not only those that warn</label>
    ${shown.length ? html`<div class="log" tabindex="0" role="region" aria-label="What the run said">${shown.map((line) => html`<p><${Text}>${line.slice(0, 4000)}</${Text}></p>`)}</div>` : html`<${Empty}>No line speaks of trouble.</${Empty}>`}`;
}

export function Trust({ runs, theme }) {
  const run = runs[0];
  const { data: found, error } = useAnswer("events", { run: run.run }, [run.stamp, run.state]);
  const { data: measured, error: unmeasured } = useAnswer("metrics", { run: run.run, names: NAMES.join() }, run.stamp);
  const curves = measured?.curves || {};
  const curve = (name, more) => (curves[name]?.[0].length ? [{ name, steps: curves[name][0], values: curves[name][1], ...more }] : []);
  const marks = marksOf(found);
  const gap = [...curve("rollout/log_prob_diff_mean"), ...curve("rollout/log_prob_diff_limit", { ink: "warn", dash: [5, 4] })];
  const damage = Object.entries(found?.damage || {});
  return html`<h1 class="unseen">Trust</h1>
    <${Failure} error=${error} /><${Failure} error=${error === unmeasured ? "" : unmeasured} />
    ${found && html`
      <div class="verdicts">${verdicts(curves, found).map(([title, state, value, text]) => html`<${Verdict} key=${title} title=${title} state=${state} value=${value}>${text}</${Verdict}>`)}</div>
      ${damage.length > 0 && html`<${Section} id="damage" title="Damaged files"><dl class="plain">${damage.map(([file, what]) => html`<div><dt><${Text}>${file}</${Text}></dt><dd><${Text}>${what}</${Text}></dd></div>`)}</dl></${Section}>`}
      ${found.failure && html`<${Section} id="failure" title="Why it failed" note="log/failure.txt"><div class="log" tabindex="0" role="region" aria-label="Failure"><${Text} block>${found.failure}</${Text}></div></${Section}>`}
      <${Section} id="events" title="What happened"><${Told} events=${found.events} /></${Section}>
      ${gap.length > 0 && html`<${Section} id="mismatch" title="Difference of log-probs" note="nats; dashed: the limit, over which the run names the cause below">
        <div class="card"><${Chart} title="Mean difference of log-probs" curves=${gap} marks=${marks} theme=${theme} height=${170} log=${true} /></div>
        <div class="charts">${["rollout/log_prob_diff_max", "rollout/prob_pearson", "rollout/version_lag", "reward/failed"].map((name) => curve(name).length > 0 && html`<article class="card" key=${name}><header><h3>${name}</h3><span class="last"><b>${number(last(curves, name))}</b></span></header>
          <${Chart} title=${name} curves=${curve(name)} marks=${marks} theme=${theme} height=${110} /></article>`)}</div></${Section}>`}
      <${Section} id="said" title="What the run said"><${Log} log=${found.log} /></${Section}>
      ${found.checkpoints.length > 0 && html`<${Section} id="checkpoints" title="Checkpoints"><table class="narrow"><thead><tr><th scope="col" class="n">step</th><th scope="col">digest</th><th scope="col" class="n">files</th></tr></thead><tbody>
        ${found.checkpoints.map((each) => html`<tr key=${each.step}><td class="n">${each.step}</td><td>${each.damage ? html`<span class="warned"><${Text}>${each.damage}</${Text}></span>` : html`<code>${each.digest}</code>`}</td><td class="n">${each.files}</td></tr>`)}</tbody></table></${Section}>`}
    `}
    <p class="note"><a href=${address("samples", changed(new URLSearchParams(), { run: run.run, sort: "score", direction: "up" }))}>The lowest scored samples</a></p>`;
}
