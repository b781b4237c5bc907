// Curves over steps, drawn with uPlot.
import uPlot from "./vendor/uPlot.esm.js";
import { html, ink, number, runInk, useEffect, useRef } from "./ui.js";

const SYNC = uPlot.sync("steps");
const WHOLE = [...Array(8).keys()].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power));

// Returns the exponential moving average of the values. It starts at the first value, and gaps stay gaps.
export function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

// Returns the lines of a curve. Behind a smoothed curve, its raw values are drawn faintly.
function linesOf({ name, steps, values, raw, place = 0, ink: own = runInk(place), dash }, log) {
  const shown = (all) => (log ? all.map((value) => (value > 0 ? value : null)) : all);
  const behind = { stroke: ink(runInk(place)), width: 1, alpha: 0.25, points: { show: false } };
  const points = { show: steps.length < 3, size: 5, fill: ink(runInk(place)) };
  const series = { stroke: ink(own), width: 1.5, dash, spanGaps: true, points };
  return [...(raw ? [{ steps, values: shown(raw), series: behind }] : []), { name, steps, values: shown(values), series }];
}

function axis(digits, size) {
  return {
    stroke: ink("faint"),
    grid: { stroke: ink("grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    size,
    gap: 4,
    values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, digits))),
    space: 42,
  };
}

// Returns a function that draws vertical lines for checkpoints, restarts and warnings.
function drawn(marks) {
  return (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of marks) {
      const at = Math.round(plot.valToPos(mark.step, "x", true)) + 0.5;
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ink(mark.ink);
      ctx.setLineDash(mark.kind === "restart" ? [4, 3] : []);
      ctx.globalAlpha = mark.kind === "checkpoint" ? 0.9 : 0.7;
      ctx.beginPath();
      ctx.moveTo(at, mark.kind === "checkpoint" ? bbox.top + bbox.height - 6 * devicePixelRatio : bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
}

// Returns the range of the axis, with space above and below. A constant curve lies in the middle.
function around(_, low, high) {
  if (low === null) return [0, 1];
  const pad = high === low ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.08;
  return [low - pad, high + pad];
}

// Returns the text for the place under the pointer: the step, each curve's value, and the step's events.
function caption(plot, lines, marks) {
  const at = plot.cursor.idx ?? null;
  if (at === null) return "";
  const step = plot.data[0][at];
  const named = lines.map(({ name }, i) => [name, number(plot.data[i + 1][at])]).filter(([name]) => name);
  const values = named.map(([name, value]) => (named.length > 1 ? `${name} ${value}` : value));
  return [`step ${step}`, ...values, ...marks.filter((mark) => mark.step === step).map((mark) => mark.text)].join(" · ");
}

function brushed(plot, onZoom) {
  const { left, width } = plot.select;
  const [from, to] = [left, left + width].map((at) => plot.posToVal(at, "x"));
  if (width > 4) onZoom?.(Math.ceil(from), Math.floor(to));
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

// A chart. Each curve is {name, steps, values, raw (unsmoothed values), place (index of its run), ink, dash}.
export function Chart({ title, curves, marks = [], log = false, theme, onZoom, zoom, height }) {
  const box = useRef(null);
  const read = useRef(null);
  const ends = curves.map(({ name, steps, values }) => [name, steps.length, steps.at(-1), values[0], values.at(-1)]);
  useEffect(() => {
    const [held, readout] = [box.current, read.current]; // uPlot and the observer may call back when the chart is gone
    const size = () => ({ width: Math.max(held.clientWidth, 80), height: held.clientHeight });
    const lines = curves.flatMap((curve) => linesOf(curve, log));
    const options = {
      ...size(),
      legend: { show: false },
      cursor: {
        sync: { key: SYNC.key, setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
      },
      scales: { x: { time: false, range: zoom ? () => zoom : undefined }, y: log ? { distr: 3 } : { range: around } },
      axes: [{ ...axis(4, 24), incrs: WHOLE }, axis(3, 48)],
      series: [{}, ...lines.map(({ series }) => series)],
      hooks: {
        drawAxes: [drawn(marks)],
        setCursor: [(plot) => (readout.textContent = caption(plot, lines, marks))],
        setSelect: [(plot) => brushed(plot, onZoom)],
      },
    };
    const plot = new uPlot(options, uPlot.join(lines.map(({ steps, values }) => [steps, values])), held);
    const resized = new ResizeObserver(() => plot.setSize(size()));
    resized.observe(held);
    return () => {
      resized.disconnect();
      plot.destroy();
    };
  }, [JSON.stringify([title, ends, marks.length, log, theme, zoom])]);
  const label = ends.map(([name, , , first, last]) => `${name}: ${number(first)} to ${number(last)}`).join("; ");
  return html`<figure class="chart" role="img" aria-label=${`${title}. ${label}`}>
    <div class="canvas" ref=${box} style=${{ height: `${height}px` }}></div>
    <figcaption ref=${read}></figcaption>
  </figure>`;
}
