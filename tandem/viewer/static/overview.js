// Overview: curves of one run or several, what differs between their configs, what happened on the way.
import { Chart, smoothed } from "./chart.js";
import { Choice, Empty, Failure, Section, Text, changed, go, html, number, runInk, seconds, useAnswer, useEffect, useMemo, useState, ask } from "./ui.js";

const GROUPS = [
  ["Reward", /^(reward\/(mean|zero_std_share|failed)|rm\/(accuracy|loss)|sft\/loss|val\/(accuracy|reward|loss))$/],
  ["Policy", /^(actor\/(kl|ppo_kl|kl_in_reward|entropy|clip_fraction|grad_norm|loss|lr)|critic\/(loss|grad_norm|explained_variance)|(sft|rm)\/grad_norm)$/],
  ["Length", /^(response_length\/(mean|max|clip_ratio)|prompt_length\/mean)$/],
  ["Throughput", /^(perf\/(step_tokens_per_s|gen_tokens_per_s_per_device|train_tokens_per_s_per_device|mfu)|timing\/(step|gen|update_actor))$/],
  ["Devices", /^(perf\/busy_share\/.*|perf\/communication_share|perf\/.*(memory|peak).*|memory\/.*)$/],
  ["Rollout engine", /^rollout\/(log_prob_diff_mean|log_prob_diff_max|kl|version_lag|cache_use|peak_running|preemptions|cached_prefix_tokens|decode_steps)$/],
];
const MARKS = { checkpoint: "accent", restart: "faint", warning: "warn" };
const MOST = 24; // charts of one search

// Events of a run as marks on the axis of steps.
export function marksOf(found) {
  if (!found) return [];
  const starts = found.events.filter((event) => event.event === "start");
  return [
    ...found.checkpoints.map(({ step }) => ({ step, kind: "checkpoint", ink: MARKS.checkpoint, text: "checkpoint" })),
    ...starts.slice(1).map((event) => ({ step: event.step, kind: "restart", ink: MARKS.restart, text: "restart" })),
    ...found.events.filter((event) => event.event === "warning").map((event) => ({ step: event.step, kind: "warning", ink: MARKS.warning, text: event.name || "warning" })),
  ].filter((mark) => Number.isFinite(mark.step));
}

// Answers of several runs, in their order; one that fails counts as its error.
export function useEach(name, runs, more = {}) {
  const [found, setFound] = useState([]);
  const key = JSON.stringify([name, more, runs.map((run) => [run.run, run.stamp])]);
  useEffect(() => {
    const control = new AbortController();
    const asked = runs.map((run) => ask(name, { run: run.run, ...more }, control.signal).catch((error) => ({ error: error.message })));
    Promise.all(asked).then((answers) => control.signal.aborted || setFound(answers.map((answer, i) => ({ run: runs[i], place: i, answer }))));
    return () => control.abort();
  }, [key]);
  return found.filter((each) => runs.some((run) => run.run === each.run.run));
}

function Facts({ runs }) {
  return html`<div class="facts-row">
    ${runs.map((run, place) => {
      const total = run.total ? ` of ${run.total}` : "";
      return html`<div class="facts" key=${run.run}>
        <h2><i class="swatch" style=${{ background: `var(--${runInk(place)})` }}></i><${Text}>${run.run}</${Text}></h2>
        <dl>
          <div><dt>State</dt><dd>${run.state}</dd></div>
          <div><dt>Step</dt><dd>${run.steps ?? "–"}<small>${total}</small></dd></div>
          <div><dt><${Text}>${run.metric || "reward"}</${Text}></dt><dd>${number(run.last)}</dd></div>
          <div><dt>Algorithm</dt><dd><${Text}>${run.algorithm || "–"}</${Text}></dd></div>
          <div><dt>Samples</dt><dd>${run.files}<small> files</small></dd></div>
        </dl>
      </div>`;
    })}
  </div>`;
}

function Controls({ route, set }) {
  const { params } = route;
  const smooth = params.get("smooth") || "0";
  return html`<div class="controls" role="toolbar" aria-label="Charts">
    <input type="search" data-search placeholder="Any metric, such as timing/" aria-label="Metrics whose name contains" value=${params.get("metric") || ""}
      onInput=${(event) => set({ metric: event.target.value })} />
    <label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${smooth} onInput=${(event) => set({ smooth: Number(event.target.value) || null })} />
      <output>${smooth}</output></label>
    <${Choice} label="Scale" options=${[["", "linear"], ["1", "log"]]} value=${params.get("log") || ""} onChange=${(log) => set({ log })} />
    ${params.get("from") && html`<button type="button" onClick=${() => set({ from: null, to: null })}>Steps ${params.get("from")}–${params.get("to")} ×</button>`}
  </div>`;
}

function Charts({ names, found, marks, route, theme, set }) {
  const { params } = route;
  const weight = Number(params.get("smooth") || 0);
  const zoom = params.get("from") ? [Number(params.get("from")), Number(params.get("to"))] : null;
  const big = params.get("big");
  return html`<div class="charts">
    ${names.map((name) => {
      const curves = found
        .filter(({ answer }) => answer.curves?.[name]?.[0].length)
        .map(({ run, place, answer }) => {
          const [steps, values] = answer.curves[name];
          return { name: run.run, place, steps, values: weight ? smoothed(values, weight) : values, raw: weight ? values : null };
        });
      if (!curves.length) return null;
      const last = curves.map((curve) => curve.values.at(-1));
      return html`<article class=${`card ${big === name ? "big" : ""}`} key=${name}>
        <header><h3><button type="button" aria-expanded=${big === name} onClick=${() => set({ big: big === name ? null : name })}><${Text}>${name}</${Text}></button></h3>
          <span class="last">${last.map((value, i) => html`<b style=${{ color: curves.length > 1 ? `var(--${runInk(curves[i].place)})` : undefined }}>${number(value)}</b> `)}</span></header>
        <${Chart} key=${big === name} title=${name} curves=${curves} marks=${marks} log=${params.get("log") === "1"} theme=${theme} zoom=${zoom}
          height=${big === name ? 380 : 130} onZoom=${(from, to) => set({ from, to })} />
      </article>`;
    })}
  </div>`;
}

function Config({ runs }) {
  const found = useEach("config", runs);
  const [wanted, setWanted] = useState("");
  if (found.length !== runs.length) return null;
  const broken = found.find(({ answer }) => answer.error && typeof answer.error === "string" && Object.keys(answer).length === 1);
  if (broken) return html`<${Failure} error=${broken.answer.error} />`;
  const keys = [...new Set(found.flatMap(({ answer }) => Object.keys(answer)))];
  const differing = keys.filter((key) => new Set(found.map(({ answer }) => JSON.stringify(answer[key]))).size > 1);
  const several = runs.length > 1;
  const shown = (several && !wanted ? differing : keys.filter((key) => key.includes(wanted))).slice(0, 400);
  return html`<${Section} id="config" title=${several ? "What differs between the configs" : "Config"} note=${several ? `${differing.length} of ${keys.length} keys` : `${keys.length} keys`}>
    <input type="search" placeholder="Keys that contain …" aria-label="Keys of the config" value=${wanted} onInput=${(event) => setWanted(event.target.value)} />
    ${(several || wanted) && html`<div class="scroll" tabindex="0" aria-label="Config"><table class="config"><thead><tr><th scope="col">key</th>${found.map(({ run }) => html`<th scope="col"><${Text}>${run.run}</${Text}></th>`)}</tr></thead>
      <tbody>${shown.map((key) => html`<tr key=${key}><th scope="row"><${Text}>${key}</${Text}></th>
        ${found.map(({ answer }) => html`<td><${Text}>${answer[key] === undefined ? "–" : JSON.stringify(answer[key])}</${Text}></td>`)}</tr>`)}</tbody></table></div>`}
  </${Section}>`;
}

function Happened({ events }) {
  const rows = events.flatMap(({ run, place, answer }) => marksOf(answer.error ? null : answer).map((mark) => ({ ...mark, run, place })));
  if (!rows.length) return null;
  const counts = ["checkpoint", "restart", "warning"].map((kind) => [kind, rows.filter((row) => row.kind === kind)]).filter(([, all]) => all.length);
  return html`<p class="happened" aria-label="Events">
    ${counts.map(([kind, all]) => html`<span><i class=${`mark ${kind}`}></i>${all.length} ${kind}${all.length > 1 ? "s" : ""} <small>${kind === "checkpoint" ? `last after step ${all.at(-1).step}` : all.slice(0, 4).map((row) => `${row.text === kind ? "" : `${row.text} `}after step ${row.step}`).join(", ")}</small></span>`)}
  </p>`;
}

export function Overview({ runs, route, theme }) {
  const set = (changes) => go("overview", changed(route.params, changes), { replace: true });
  const wanted = (route.params.get("metric") || "").trim();
  const readable = runs.filter((run) => run.state !== "unreadable");
  const listing = useAnswer("metrics", readable[0] ? { run: readable[0].run } : null, readable[0]?.stamp);
  const known = listing.data?.names || [];
  const groups = useMemo(() => {
    if (wanted) return [["Metrics", known.filter((name) => name.includes(wanted)).slice(0, MOST)]];
    return GROUPS.map(([title, pattern]) => [title, known.filter((name) => pattern.test(name))]).filter(([, names]) => names.length);
  }, [known.join(), wanted]);
  const names = groups.flatMap(([, all]) => all);
  const found = useEach("metrics", names.length ? readable : [], { names: names.join() });
  const events = useEach("events", readable);
  const marks = events.flatMap(({ answer }) => marksOf(answer.error ? null : answer));
  return html`<h1 class="unseen">Overview</h1>
    <${Facts} runs=${runs} />
    <${Controls} route=${route} set=${set} />
    <${Happened} events=${events} />
    <${Failure} error=${listing.error} />
    ${listing.data && !known.length && html`<${Empty}>No step is done yet.</${Empty}>`}
    ${wanted && listing.data && !names.length && html`<${Empty}>No metric has this in its name.</${Empty}>`}
    ${groups.map(([title, all]) => html`<${Section} key=${title} id=${`group-${title}`} title=${title}>
      <${Charts} names=${all} found=${found} marks=${marks} route=${route} theme=${theme} set=${set} /></${Section}>`)}
    ${readable.length > 0 && html`<${Config} runs=${readable} />`}`;
}
