// Curves over steps, drawn by uPlot.
import uPlot from "./vendor/uPlot.esm.js";
import { html, ink, number, runInk, useEffect, useRef } from "./ui.js";

const SYNC = uPlot.sync("steps");
const WHOLE = [...Array(8).keys()].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power));

// An exponential mean that begins at the first value; gaps stay gaps.
export function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

// Curves of several runs over one axis. uPlot tells "no step of this run" (undefined) from "no value" (null).
function aligned(curves) {
  return uPlot.join(curves.map(([steps, values]) => [steps, values]));
}

function axis(theme, formatted, size) {
  return {
    stroke: ink("faint"),
    grid: { stroke: ink("grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    size,
    gap: 4,
    values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatted(tick))),
    space: 42,
  };
}

// Marks of events, as lines over the whole height: where a run was saved, began anew, or warned.
function drawn(marks) {
  return (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of marks) {
      const at = Math.round(plot.valToPos(mark.step, "x", true)) + 0.5;
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = ink(mark.ink);
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

function options(box, { log, marks, theme, curves, onZoom, points, zoom }, legend) {
  const series = curves.flatMap((curve, place) => [
    ...(curve.raw
      ? [{ stroke: ink(runInk(curve.place ?? place)), width: 1, alpha: 0.25, points: { show: false } }]
      : []),
    {
      label: curve.name,
      stroke: ink(curve.ink || runInk(curve.place ?? place)),
      width: points ? 0 : 1.5,
      dash: curve.dash,
      spanGaps: true,
      paths: points ? () => null : undefined,
      points: { show: points || curve.steps.length < 3, size: 5, fill: ink(runInk(curve.place ?? place)) },
    },
  ]);
  return {
    width: Math.max(box.clientWidth, 80),
    height: box.clientHeight,
    legend: { show: false },
    cursor: {
      sync: { key: SYNC.key, setSeries: false },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
    },
    scales: { x: { time: false, range: zoom ? () => zoom : undefined }, y: log ? { distr: 3 } : { range: around } },
    axes: [{ ...axis(theme, (tick) => number(tick), 24), incrs: WHOLE }, axis(theme, (tick) => number(tick, 3), 48)],
    series: [{}, ...series],
    hooks: {
      drawAxes: [drawn(marks)],
      setCursor: [(plot) => legend(plot)],
      setSelect: [
        (plot) => {
          const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map((at) =>
            plot.posToVal(at, "x"),
          );
          if (plot.select.width > 4) onZoom?.(Math.ceil(from), Math.floor(to));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
    },
  };
}

// Room above and below; a curve that never moves lies in the middle.
function around(_, low, high) {
  if (low === null) return [0, 1];
  const pad = high === low ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.08;
  return [low - pad, high + pad];
}

// One chart. A curve: {name, steps, values, raw (unsmoothed values), place (its run's), ink, dash}.
export function Chart({
  title,
  curves,
  marks = [],
  log = false,
  theme,
  onZoom,
  zoom,
  height = 150,
  points = false,
  label,
}) {
  const box = useRef(null);
  const read = useRef(null);
  const key = JSON.stringify([
    title,
    curves.map((c) => [c.name, c.steps.length, c.steps.at(-1), c.values.at(-1), c.values[0]]),
    marks.length,
    log,
    theme,
    zoom,
    points,
  ]);
  useEffect(() => {
    const usable = curves.map((curve) => ({
      ...curve,
      values: log ? curve.values.map((v) => (v > 0 ? v : null)) : curve.values,
    }));
    const data = aligned(
      usable.flatMap((c) => [
        ...(c.raw ? [[c.steps, log ? c.raw.map((v) => (v > 0 ? v : null)) : c.raw]] : []),
        [c.steps, c.values],
      ]),
    );
    const near = marks.reduce((all, mark) => all.set(mark.step, [...(all.get(mark.step) || []), mark.text]), new Map());
    const legend = (plot) => {
      const at = plot.cursor.idx;
      if (!read.current) return;
      if (at === null || at === undefined) {
        read.current.textContent = "";
        return;
      }
      const named = plot.series
        .slice(1)
        .map((series, index) => [series.label, plot.data[index + 1][at]])
        .filter(([name]) => name && name !== "Value");
      const values = named.map(([name, value]) => `${curves.length > 1 ? `${name} ` : ""}${number(value)}`);
      read.current.textContent = [`step ${plot.data[0][at]}`, ...values, ...(near.get(plot.data[0][at]) || [])].join(
        " · ",
      );
    };
    const plot = new uPlot(
      options(box.current, { log, marks, theme, curves: usable, onZoom, points, zoom }, legend),
      data,
      box.current,
    );
    const held = box.current; // the observer may speak once more when the chart is gone
    const resized = new ResizeObserver(() =>
      plot.setSize({ width: Math.max(held.clientWidth, 80), height: held.clientHeight }),
    );
    resized.observe(held);
    return () => {
      resized.disconnect();
      plot.destroy();
    };
  }, [key]);
  const ends = curves
    .map((curve) => `${curve.name}: ${number(curve.values[0])} to ${number(curve.values.at(-1))}`)
    .join("; ");
  return html`<figure class="chart" role="img" aria-label=${`${label || title}. ${ends}`}>
    <div class="canvas" ref=${box} style=${{ height: `${height}px` }}></div>
    <figcaption ref=${read}></figcaption>
  </figure>`;
}
