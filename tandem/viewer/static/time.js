// Time: a step as a Gantt chart of roles and phases, idle workers, the long tail of generation, bytes moved.
import { Histogram } from "./histogram.js";
import {
  Empty, Failure, Section, Table, bytes, changed, escaped, go, html, number, ofRuns, seconds, text, useAnswer, useEffect,
  useKeys, useMemo, useRef, useState,
} from "./ui.js";

const INKS = 12;
const KNOWN = [
  "generate_sequences", "update_actor", "reward", "old_log_prob", "weight_sync", "update_critic", "gen", "values",
  "reshard", "save_checkpoint", "ref", "write_samples",
];
const WHOLE = ["step", "testing"]; // phases of the controller that consist of the work of others
const LANE = 22;
const NAMES = 118; // width of the tracks' names in pixels
const LETTER = 6.2; // width of a letter in a phase's name in pixels

// Returns the colour class of a phase. A phase has the same colour in every step and run.
export function inkOf(phase) {
  if (WHOLE.includes(phase)) return "phase-whole";
  const known = KNOWN.indexOf(phase);
  if (known >= 0) return `phase-${known}`;
  return `phase-${[...phase].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 997, 7) % INKS}`;
}

// Returns the top of each track's row, and the end of the last row. The height of a row follows its nested phases.
export function lanes(spans) {
  const depths = new Map();
  for (const [track, , , , depth] of spans) depths.set(track, Math.max(depths.get(track) ?? 0, depth));
  const ordered = [...depths].sort(
    ([a], [b]) => (b === "controller") - (a === "controller") || a.localeCompare(b, "en", { numeric: true }),
  );
  const tops = new Map();
  let end = 0;
  for (const [track, depth] of ordered) {
    tops.set(track, end);
    end += (depth + 1) * LANE + 8;
  }
  return { tops, end };
}

function useWidth() {
  const box = useRef(null);
  const [width, setWidth] = useState(800);
  useEffect(() => {
    const observer = new ResizeObserver(() => setWidth(box.current?.clientWidth || 800));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return [box, width];
}

// One phase: track, name, start, end (seconds), depth.
function Phase({ span, x, top, over, onOver }) {
  const [, name, start, end] = span;
  const wide = Math.max(x(end) - x(start), 1);
  const box = { x: x(start), y: top, width: wide, height: LANE - 3, rx: 2 };
  return html`<g onPointerEnter=${onOver}>
    <rect class=${`span ${inkOf(name)} ${over ? "over" : ""}`} ...${box}><title>${described(span)}</title></rect>
    ${wide > name.length * LETTER + 8 && html`<text class="span-name" x=${box.x + 5} y=${top + 13.5}>${escaped(name)}</text>`}
  </g>`;
}

function described([track, name, start, end]) {
  return escaped(`${track} · ${name} · ${seconds(end - start)}, from ${seconds(start)} to ${seconds(end)}`);
}

function Gantt({ data }) {
  const [box, width] = useWidth();
  const [over, setOver] = useState(null);
  const { tops, end } = useMemo(() => lanes(data.spans), [data]);
  const room = Math.max(width - NAMES, 60);
  const x = (at) => NAMES + (Math.max(0, Math.min(at, data.seconds)) / data.seconds) * room;
  const high = end + 16;
  const parts = room > 500 ? 5 : 2;
  const ticks = Array.from({ length: parts + 1 }, (_, i) => (data.seconds * i) / parts);
  const label = `Step ${data.step}: ${data.spans.length} phases of ${tops.size} workers in ${seconds(data.seconds)}`;
  return html`<div class="gantt" ref=${box}>
    <svg width=${width} height=${high} role="img" aria-label=${label} onPointerLeave=${() => setOver(null)}>
      ${ticks.map(
        (tick) => html`<g>
          <line class="tick" x1=${x(tick)} x2=${x(tick)} y1="0" y2=${high - 20} />
          <text class="tick-name" x=${x(tick)} y=${high - 6} text-anchor=${tick ? "end" : "start"}>${seconds(tick)}</text>
        </g>`,
      )}
      ${[...tops].map(
        ([track, top]) => html`<text class="track" x="0" y=${top + 15}>
          ${escaped(track.slice(0, 18))}<title>${escaped(track)}</title>
        </text>`,
      )}
      ${data.spans.map((span, i) => {
        const top = tops.get(span[0]) + span[4] * LANE;
        return html`<${Phase} key=${i} span=${span} x=${x} top=${top} over=${over === span} onOver=${() => setOver(span)} />`;
      })}
    </svg>
    <p class="note" aria-live="polite">${over ? described(over) : "Point at a phase to see its times."}</p>
  </div>`;
}

// Returns the seconds of each phase over all workers, without the phases nested in it.
export function totals(spans) {
  const sums = new Map();
  const open = new Map();
  for (const [track, name, start, end] of spans) {
    const held = (open.get(track) || []).filter((outer) => outer.end > start);
    const outer = held.at(-1);
    if (outer) sums.set(outer.name, sums.get(outer.name) - (end - start));
    sums.set(name, (sums.get(name) || 0) + end - start);
    open.set(track, [...held, { name, end }]);
  }
  for (const name of WHOLE) sums.delete(name);
  return [...sums].sort((a, b) => b[1] - a[1]);
}

const named = (phase) => html`<i class=${`swatch ${inkOf(phase)}`}></i>${text(phase)}`;

function Phases({ spans }) {
  const all = totals(spans);
  const most = all[0]?.[1] || 1;
  const bar = (name, spent) => html`<i class=${inkOf(name)} style=${{ width: `${(spent / most) * 100}%` }}></i>`;
  return html`<${Table} kind="bars-table" head=${["phase", ["worker seconds", "n"], ["", "bar-cell"]]}
    rows=${all.map(([name, spent]) => [named(name), seconds(spent), bar(name, spent)])} />`;
}

function Waits({ waits }) {
  if (!waits.length) return html`<${Empty}>No worker was idle for more than 2% of the step.</${Empty}>`;
  const rows = waits.map(({ track, start, end, other, phase, share }) => [
    text(track),
    seconds(end - start),
    other
      ? html`${text(other)} in ${named(phase)} <small>${Math.round(share * 100)}% of it</small>`
      : html`<span class="note">nothing recorded (the controller worked, or a process started)</span>`,
  ]);
  return html`<${Table} head=${["idle worker", ["time", "n"], "meanwhile"]} rows=${rows} />`;
}

function binned(lengths) {
  const [low, high] = [lengths[0], lengths.at(-1)];
  const count = Math.min(40, high - low + 1);
  const width = Math.ceil((high - low + 1) / count);
  const counts = Array(count).fill(0);
  for (const length of lengths) counts[Math.floor((length - low) / width)] += 1;
  return { edges: Array.from({ length: count + 1 }, (_, i) => low + i * width), counts };
}

function Tail({ lengths, onRange }) {
  if (!lengths.length) return html`<${Empty}>The samples of this step are not in the folder.</${Empty}>`;
  const quantile = (share) => lengths[Math.min(lengths.length - 1, Math.floor(share * lengths.length))];
  const longest = lengths.at(-1);
  const alone = longest ? Math.round((1 - quantile(0.9) / longest) * 100) : 0;
  return html`<${Histogram} name="length" title="response length, tokens" data=${binned(lengths)} range="" onChange=${onRange} />
    <p>
      Half of the responses end by token ${quantile(0.5)}, 90% by token ${quantile(0.9)}, the last at token ${longest}.
      At ${alone}% of the positions, at most 10% of the responses are still being written.
    </p>
    <p class="note">Runs record the length of each response, but not the time when it ended.</p>`;
}

const MOVED = [
  ["busy_share", "busy", (v) => `${Math.round(v * 100)}%`],
  ["wait_s", "waited", seconds],
  ["transfer_s", "transfer", seconds],
  ["transfer_bytes", "received", bytes],
  ["collective_s", "collectives", seconds],
  ["collective_bytes", "between ranks", bytes],
];

function Moved({ run, step }) {
  const { data: listing } = useAnswer("metrics", { run: run.run }, run.stamp);
  const names = (listing?.names || []).filter((name) => MOVED.some(([what]) => name.startsWith(`perf/${what}/`)));
  const { data } = useAnswer("metrics", names.length ? { run: run.run, names: names.join() } : null, run.stamp);
  if (!data) return html`<${Empty}>This run has not recorded the bytes it moved.</${Empty}>`;
  const cell = (name, shown) => {
    const [steps, values] = data.curves[name] || [[], []];
    const value = values[steps.indexOf(step)];
    return value === undefined ? "–" : shown(value);
  };
  const roles = [...new Set(names.map((name) => name.split("/").slice(2).join("/")))];
  const rows = roles.map((role) => [text(role), ...MOVED.map(([what, , shown]) => cell(`perf/${what}/${role}`, shown))]);
  return html`<${Table} head=${["role", ...MOVED.map(([, title]) => [title, "n"])]} rows=${rows} />`;
}

function Steps({ data, move, set }) {
  const choose = (event) => set({ step: event.target.value });
  return html`<div class="controls" role="toolbar" aria-label="Steps">
    <button type="button" aria-label="Previous step" disabled=${data.steps[0] === data.step} onClick=${() => move(-1)}>
      ←
    </button>
    <label>Step
      <select value=${String(data.step)} onChange=${choose}>
        ${data.steps.map((step) => html`<option value=${String(step)}>${step}</option>`)}
      </select>
    </label>
    <button type="button" aria-label="Next step" disabled=${data.steps.at(-1) === data.step} onClick=${() => move(1)}>→</button>
    <span><strong>${seconds(data.seconds)}</strong>, including validation and checkpoint</span>
    ${data.left_out > 0 && html`<span class="warned">${number(data.left_out)} more phases are not drawn</span>`}
  </div>`;
}

export function Time({ run, params, set }) {
  const step = params.get("step");
  const { data, error } = useAnswer("time", step ? { run: run.run, step } : { run: run.run }, step ? "" : run.stamp);
  const move = (by) => {
    const next = data?.steps[data.steps.indexOf(data.step) + by];
    if (next !== undefined) set({ step: next });
  };
  useKeys((key) => key in { j: 1, k: 1 } && move(key === "j" ? 1 : -1));
  if (!data) return html`<${Failure} error=${error} />`;
  if (!data.steps.length) return html`<${Empty}>The timeline has no finished step.</${Empty}>`;
  const ranged = (length) => go("samples", changed(ofRuns(params), { step: data.step, length, kind: "train" }));
  return html`<${Steps} data=${data} move=${move} set=${set} />
    <${Section} id="gantt" title="Who did what"><${Gantt} data=${data} /></${Section}>
    <div class="halves">
      <${Section} id="phases" title="Where the time went" note="without nested phases">
        <${Phases} spans=${data.spans} />
      </${Section}>
      <${Section} id="waits" title="Idle workers"><${Waits} waits=${data.waits} /></${Section}>
      <${Section} id="tail" title="Long tail of generation">
        <${Tail} lengths=${data.lengths} onRange=${ranged} />
      </${Section}>
      <${Section} id="moved" title="Bytes moved"><${Moved} run=${run} step=${data.step} /></${Section}>
    </div>`;
}
