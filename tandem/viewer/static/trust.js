// Trust: whether rollout and training agree, how old the weights behind the samples were, and what went wrong.
import { Chart } from "./chart.js";
import { marksOf } from "./overview.js";
import { Empty, Failure, Pairs, Section, Table, address, html, number, text, useAnswer, useState } from "./ui.js";

const CURVES = [
  "rollout/log_prob_diff_max", "rollout/prob_pearson", "rollout/version_lag", "rollout/changed_samples", "reward/failed",
];
const NAMES = ["rollout/log_prob_diff_mean", "rollout/log_prob_diff_limit", ...CURVES];
// Names of warnings about why rollout and training differ, from tandem.watch.trust.Cause.
const CAUSES = [
  "retokenised", "stale", "reshaped", "unrepeatable", "leaked", "unadapted", "unscaled", "headless", "early", "late",
  "leftover", "numerics",
];
const MARKED = /warning|differ|fail|error|stall|hang|limit|resumed|restart|killed|lost|refus|remedy/i;
const LINES = 300;

function last(curves, name) {
  return curves[name]?.[1].at(-1);
}

function highest(curves, name) {
  return curves[name]?.[1].reduce((a, b) => Math.max(a, b), -Infinity);
}

// Returns the verdicts. Each has a title, a state ("good", "fair", "bad" or "none"), a value and a sentence.
function verdicts(curves, { events }) {
  const ofKind = (kind) => events.filter((event) => event.event === kind);
  const [starts, warnings] = [ofKind("start"), ofKind("warning")];
  const failures = ofKind("end").filter((event) => event.how === "failed");
  const [gap, limit] = [highest(curves, "rollout/log_prob_diff_mean"), last(curves, "rollout/log_prob_diff_limit")];
  const over = gap !== undefined && gap > limit;
  const zero = (name) => {
    const worst = highest(curves, name);
    return [worst === undefined ? "none" : worst ? "bad" : "good", worst];
  };
  const [aged, lag] = zero("rollout/version_lag");
  const [altered, tokens] = zero("rollout/changed_samples");
  const [, failed] = zero("reward/failed");
  const known = (value, unit) => (value === undefined ? "not recorded" : `${number(value)} ${unit}`);
  return [
    gap === undefined
      ? ["Rollout and training", "none", "not measured", "No step of this run compared the log-probs."]
      : ["Rollout and training", over ? "bad" : "good", `${number(gap, 3)} nats`,
          `The largest mean log-prob difference of a step, ${over ? "above" : "within"} the limit of ${number(limit, 3)}.`],
    ["Weights", aged, known(lag, "updates behind"),
      "The age of the oldest weights that wrote a token. Each weight sync compares digests, and a difference ends the run."],
    ["Tokens", altered, known(tokens, "changed"),
      "Samples whose tokens in training differ from the tokens that the engine wrote."],
    ["Rewards", failed ? "bad" : "good", failed ? `${number(failed)} failed` : "none failed",
      "Calls of the reward function that raised, crashed or timed out, in the worst step."],
    ["Starts", failures.length ? "bad" : starts.length > 1 ? "fair" : "good", `${starts.length}`,
      `${Math.max(starts.length - 1, 0)} restarts, ${failures.length} failures.`],
    ["Warnings", warnings.length ? "fair" : "good", `${warnings.length}`, "Signs that learning goes wrong, each counted once."],
  ];
}

function Events({ events }) {
  if (!events.length) return html`<${Empty}>No events are recorded (events.jsonl).</${Empty}>`;
  const sentences = {
    start: (event) => `started after step ${event.step}`,
    end: (event) => `ended: ${event.how}`,
    warning: (event) => html`<b>${text(event.name)}</b> after step ${text(event.step)}: ${text(event.text)}`,
  };
  return html`<ol class="events">
    ${events.map(
      (event) => html`<li class=${`event ${event.how === "failed" ? "failed" : event.event}`}>
        <time>${text(String(event.time ?? "").replace("T", " "))}</time>
        <span class="kind">${text(event.event)}</span>
        <span>${(sentences[event.event] || (() => text(JSON.stringify(event))))(event)}</span>
      </li>`,
    )}
  </ol>`;
}

function Log({ log }) {
  const [all, setAll] = useState(false);
  const lines = log.split("\n").filter((line) => line && (all || MARKED.test(line)));
  return html`<label class="tick">
      <input type="checkbox" checked=${all} onChange=${() => setAll(!all)} />
      All lines of log/run.log, not only warnings
    </label>
    ${lines.length === 0 && html`<${Empty}>The log has no warnings.</${Empty}>`}
    ${lines.length > 0 &&
    html`<div class="log" tabindex="0" role="region" aria-label="Log of the run">
      ${lines.slice(-LINES).map((line) => html`<p>${text(line.slice(0, 4000))}</p>`)}
    </div>`}`;
}

function Mismatch({ curves, events, marks, theme }) {
  const drawn = (name, more) => (curves[name] ? [{ name, steps: curves[name][0], values: curves[name][1], ...more }] : []);
  const limit = drawn("rollout/log_prob_diff_limit", { ink: "warn", dash: [5, 4] });
  const gap = [...drawn("rollout/log_prob_diff_mean"), ...limit];
  const shared = { marks, theme };
  if (!gap.length) return null;
  const causes = events.filter(({ event, name }) => event === "warning" && CAUSES.includes(name));
  return html`<${Section} id="mismatch" title="Difference of log-probs" note="in nats; the dashed line is the limit">
    ${causes.length > 0 ? html`<${Events} events=${causes} />` : html`<p class="note">The run has found no cause.</p>`}
    <div class="card"><${Chart} title="Mean difference of log-probs" curves=${gap} ...${shared} height=${170} log=${true} /></div>
    <div class="charts">
      ${CURVES.filter((name) => curves[name]).map(
        (name) => html`<article class="card" key=${name}>
          <header><h3>${name}</h3><span class="last"><b>${number(last(curves, name))}</b></span></header>
          <${Chart} title=${name} curves=${drawn(name)} ...${shared} height=${110} />
        </article>`,
      )}
    </div>
  </${Section}>`;
}

function Checkpoints({ checkpoints }) {
  const rows = checkpoints.map((each) => [
    each.step,
    each.damage ? html`<span class="warned">${text(each.damage)}</span>` : html`<code>${text(each.digest)}</code>`,
    each.files,
  ]);
  return html`<${Section} id="checkpoints" title="Checkpoints">
    <${Table} kind="narrow" head=${["step", "digest", ["files", "n"]]} rows=${rows} />
  </${Section}>`;
}

export function Trust({ run, theme }) {
  const { data: found, error } = useAnswer("events", { run: run.run }, [run.stamp, run.state]);
  const { data: measured, error: unmeasured } = useAnswer("metrics", { run: run.run, names: NAMES.join() }, run.stamp);
  const curves = Object.fromEntries(Object.entries(measured?.curves || {}).filter(([, [steps]]) => steps.length));
  const damage = Object.entries(found?.damage || {}).map((pair) => pair.map((each) => text(each)));
  const lowest = new URLSearchParams({ run: run.run, sort: "score", direction: "up" });
  return html`<${Failure} error=${error} /><${Failure} error=${error === unmeasured ? "" : unmeasured} />
    ${found &&
    html`<div class="verdicts">
        ${verdicts(curves, found).map(
          ([title, state, value, sentence]) => html`<article class=${`verdict ${state}`} key=${title}>
            <h3>${title}</h3><b>${value}</b><p>${sentence}</p>
          </article>`,
        )}
      </div>
      ${damage.length > 0 && html`<${Section} id="damage" title="Damaged files"><${Pairs} pairs=${damage} /></${Section}>`}
      ${found.failure &&
      html`<${Section} id="failure" title="Why it failed" note="log/failure.txt">
        <div class="log" tabindex="0" role="region" aria-label="Failure">${text(found.failure, true)}</div>
      </${Section}>`}
      <${Section} id="events" title="Events"><${Events} events=${found.events} /></${Section}>
      <${Mismatch} curves=${curves} events=${found.events} marks=${marksOf(found)} theme=${theme} />
      <${Section} id="log" title="Log"><${Log} log=${found.log} /></${Section}>
      ${found.checkpoints.length > 0 && html`<${Checkpoints} checkpoints=${found.checkpoints} />`}`}
    <p class="note"><a href=${address("samples", lowest)}>Samples with the lowest scores</a></p>`;
}
