// Overview: curves of one or several runs, the differences between their configs, and the runs' events.
import { Chart, smoothed } from "./chart.js";
import {
  Choice, Empty, Failure, Pairs, Search, Section, Table, html, number, runInk, text, useAnswer, useAnswers, useMemo, useState,
} from "./ui.js";

// The metrics of each group of charts: whole names, or prefixes that end with "/".
const GROUPS = [
  ["Reward", "reward/mean reward/zero_std_share reward/failed rm/accuracy rm/loss sft/loss val/accuracy val/reward val/loss"],
  ["Policy", "actor/kl actor/ppo_kl actor/kl_in_reward actor/entropy actor/clip_fraction actor/grad_norm actor/loss actor/lr" +
    " critic/loss critic/grad_norm critic/explained_variance sft/grad_norm rm/grad_norm"],
  ["Length", "response_length/mean response_length/max response_length/clip_ratio prompt_length/mean"],
  ["Throughput", "perf/step_tokens_per_s perf/gen_tokens_per_s_per_device perf/train_tokens_per_s_per_device perf/mfu" +
    " timing/step timing/gen timing/update_actor"],
  ["Devices", "perf/busy_share/ perf/communication_share perf/peak_memory perf/weight_sync_peak_bytes memory/"],
  ["Rollout engine", "rollout/log_prob_diff_mean rollout/log_prob_diff_max rollout/kl rollout/version_lag rollout/cache_use" +
    " rollout/peak_running rollout/preemptions rollout/cached_prefix_tokens rollout/decode_steps"],
].map(([title, names]) => [title, names.split(" ")]);
const INKS = { checkpoint: "accent", restart: "faint", warning: "warn" };
const SCALES = [["", "linear"], ["1", "log"]];
const MOST = 24; // most charts of one search
const KEYS = 400; // most config keys that are shown

// Returns the events of a run as marks on the axis of steps.
export function marksOf(found) {
  if (!found) return [];
  const mark = (kind, step, label = kind) => ({ kind, step, ink: INKS[kind], text: label });
  const ofKind = (kind) => found.events.filter((event) => event.event === kind);
  return [
    ...found.checkpoints.map(({ step }) => mark("checkpoint", step)),
    ...ofKind("start").slice(1).map(({ step }) => mark("restart", step)),
    ...ofKind("warning").map(({ step, name }) => mark("warning", step, name)),
  ].filter(({ step }) => Number.isFinite(step));
}

// Asks the same question of several runs. Returns the answers in the order of the runs, without those that fail.
function useEach(name, runs, more = {}) {
  const questions = runs.map(({ run }) => ({ run, ...more }));
  const { found, error } = useAnswers(name, questions, runs.map((run) => run.stamp));
  const answersOf = (run, place) =>
    found.filter(({ params }) => params.run === run.run).map(({ answer }) => ({ run, place, answer }));
  return { found: runs.flatMap(answersOf), error };
}

function Facts({ run, place }) {
  const pairs = [
    ["State", run.state],
    ["Step", html`${run.steps ?? "–"}<small>${run.total ? ` of ${run.total}` : ""}</small>`],
    [text(run.metric || "reward"), number(run.last)],
    ["Algorithm", text(run.algorithm || "–")],
    ["Samples", html`${run.files}<small> files</small>`],
  ];
  return html`<div class="facts">
    <h2><i class="swatch" style=${{ background: `var(--${runInk(place)})` }}></i>${text(run.run)}</h2>
    <${Pairs} kind="" pairs=${pairs} />
  </div>`;
}

function Controls({ params, set }) {
  const smooth = params.get("smooth") || "0";
  return html`<div class="controls" role="toolbar" aria-label="Charts">
    <${Search} data-search name="Metrics whose name contains" hint="Search metrics, such as timing/"
      value=${params.get("metric") || ""} onType=${(metric) => set({ metric })} />
    <label>Smoothing
      <input type="range" min="0" max="0.98" step="0.02" value=${smooth}
        onInput=${(event) => set({ smooth: Number(event.target.value) || null })} />
      <output>${smooth}</output>
    </label>
    <${Choice} label="Scale" options=${SCALES} value=${params.get("log") || ""} onChange=${(log) => set({ log })} />
    ${params.get("from") &&
    html`<button type="button" onClick=${() => set({ from: null, to: null })}>
      ${`Steps ${params.get("from")}–${params.get("to")} ×`}
    </button>`}
  </div>`;
}

function Card({ name, curves, params, set, ...shared }) {
  const big = params.get("big") === name;
  const enlarge = () => set({ big: big ? null : name });
  const several = curves.length > 1;
  const last = curves.map(({ place, values }) => {
    const color = several ? `var(--${runInk(place)})` : undefined;
    return html`<b style=${{ color }}>${number(values.at(-1))}</b> `;
  });
  return html`<article class=${`card ${big ? "big" : ""}`}>
    <header>
      <h3><button type="button" class="bare" aria-expanded=${big} onClick=${enlarge}>${text(name)}</button></h3>
      <span class="last">${last}</span>
    </header>
    <${Chart} key=${big} title=${name} curves=${curves} height=${big ? 380 : 130} ...${shared} />
  </article>`;
}

function Charts({ names, found, params, set, ...shared }) {
  const weight = Number(params.get("smooth") || 0);
  const curvesOf = (name) =>
    found.flatMap(({ run, place, answer }) => {
      const [steps, values] = answer.curves[name] || [[], []];
      const curve = { name: run.run, place, steps, values };
      return steps.length ? [weight ? { ...curve, values: smoothed(values, weight), raw: values } : curve] : [];
    });
  const drawn = names.map((name) => [name, curvesOf(name)]).filter(([, curves]) => curves.length);
  return html`<div class="charts">
    ${drawn.map(([name, curves]) => html`<${Card} key=${name} ...${{ name, curves, params, set, ...shared }} />`)}
  </div>`;
}

function Config({ runs }) {
  const { found, error } = useEach("config", runs);
  const [wanted, setWanted] = useState("");
  if (error || found.length !== runs.length) return html`<${Failure} error=${error} />`;
  const keys = [...new Set(found.flatMap(({ answer }) => Object.keys(answer)))];
  const shownValue = (answer, key) => (answer[key] === undefined ? "–" : JSON.stringify(answer[key]));
  const differing = keys.filter((key) => new Set(found.map(({ answer }) => shownValue(answer, key))).size > 1);
  const several = runs.length > 1;
  const shown = (several && !wanted ? differing : keys.filter((key) => key.includes(wanted))).slice(0, KEYS);
  const title = several ? "Differences between the configs" : "Config";
  const head = ["key", ...found.map(({ run }) => text(run.run))];
  const rows = shown.map((key) => [text(key), ...found.map(({ answer }) => text(shownValue(answer, key)))]);
  const note = several ? `${differing.length} of ${keys.length} keys` : `${keys.length} keys`;
  return html`<${Section} id="config" title=${title} note=${note}>
    <${Search} name="Keys of the config" hint="Search keys" value=${wanted} onType=${setWanted} />
    ${(several || wanted) &&
    html`<div class="scroll" tabindex="0" role="region" aria-label="Config">
      <${Table} kind="config" head=${head} rows=${rows} />
    </div>`}
  </${Section}>`;
}

function EventSummary({ marks }) {
  const kinds = Object.keys(INKS).map((kind) => [kind, marks.filter((mark) => mark.kind === kind)]);
  const places = (kind, all) => {
    if (kind === "checkpoint") return `last after step ${all.at(-1).step}`;
    return all.slice(0, 4).map((mark) => `${mark.text === kind ? "" : `${mark.text} `}after step ${mark.step}`).join(", ");
  };
  return html`<p class="happened" aria-label="Events">
    ${kinds.map(
      ([kind, all]) =>
        all.length > 0 &&
        html`<span>
          <i class=${`mark ${kind}`}></i>${`${all.length} ${kind}${all.length > 1 ? "s" : ""} `}
          <small>${text(places(kind, all))}</small>
        </span>`,
    )}
  </p>`;
}

function grouped(known, wanted) {
  if (wanted) return [["Metrics", known.filter((name) => name.includes(wanted)).slice(0, MOST)]];
  const of = (part) => known.filter((name) => name === part || (part.endsWith("/") && name.startsWith(part)));
  return GROUPS.map(([title, parts]) => [title, parts.flatMap(of)])
    .filter(([, names]) => names.length)
    .map(([title, names]) => [title === "Reward" && !names.some((name) => name.includes("reward")) ? "Loss" : title, names]);
}

export function Overview({ runs, params, set, theme }) {
  const wanted = (params.get("metric") || "").trim();
  const readable = runs.filter((run) => run.state !== "unreadable");
  const listing = useAnswer("metrics", readable[0] ? { run: readable[0].run } : null, readable[0]?.stamp);
  const known = listing.data?.names || [];
  const groups = useMemo(() => grouped(known, wanted), [known.join(), wanted]);
  const names = groups.flatMap(([, all]) => all);
  const { found } = useEach("metrics", names.length ? readable : [], { names: names.join() });
  const marks = useEach("events", readable).found.flatMap(({ answer }) => marksOf(answer));
  const zoom = params.get("from") ? [Number(params.get("from")), Number(params.get("to"))] : null;
  const onZoom = (from, to) => set({ from, to });
  const shared = { found, params, set, marks, theme, zoom, onZoom, log: params.get("log") === "1" };
  const facts = runs.map((run, place) => html`<${Facts} key=${run.run} run=${run} place=${place} />`);
  return html`<div class="facts-row">${facts}</div>
    <${Controls} params=${params} set=${set} />
    <${EventSummary} marks=${marks} />
    <${Failure} error=${listing.error} />
    ${listing.data && !known.length && html`<${Empty}>The run has not finished a step yet.</${Empty}>`}
    ${wanted && listing.data && !names.length && html`<${Empty}>No metric's name contains this text.</${Empty}>`}
    ${groups.map(
      ([title, all]) => html`<${Section} key=${title} id=${`group-${title}`} title=${title}>
        <${Charts} names=${all} ...${shared} />
      </${Section}>`,
    )}
    ${readable.length > 0 && html`<${Config} runs=${readable} />`}`;
}
