// How a column is distributed over the samples selected; a range is brushed with the pointer or typed.
import { html, number, useRef, useState } from "./ui.js";

const LEAST = 0.04; // height of a bar that stands for anything, so that it is seen

function bounds(range, edges) {
  if (!range) return [edges[0], edges.at(-1)];
  const [low, high] = range.includes("..") ? range.split("..") : [range, range];
  return [low === "" ? edges[0] : Number(low), high === "" ? edges.at(-1) : Number(high)];
}

export function Histogram({ name, data, range, onChange, title = name }) {
  const { edges, counts } = data;
  const box = useRef(null);
  const [brush, setBrush] = useState(null);
  const most = Math.max(1, ...counts);
  const whole = name !== "score";
  const [low, high] = bounds(range, edges);
  const bin = (event) => {
    const { left, width } = box.current.getBoundingClientRect();
    return Math.max(0, Math.min(counts.length - 1, Math.floor(((event.clientX - left) / width) * counts.length)));
  };
  const start = (event) => {
    box.current.setPointerCapture(event.pointerId);
    setBrush([bin(event), bin(event)]);
  };
  const move = (event) => brush && setBrush([brush[0], bin(event)]);
  const end = () => {
    if (!brush) return;
    const [from, to] = [Math.min(...brush), Math.max(...brush)];
    setBrush(null);
    onChange(`${edges[from]}..${whole ? edges[to + 1] - 1 : edges[to + 1]}`);
  };
  const lit = (i) =>
    brush ? i >= Math.min(...brush) && i <= Math.max(...brush) : edges[i + 1] > low && edges[i] <= high;
  const [least, greatest] = range.includes("..") ? range.split("..") : [range, range];
  const typed = (ends) => onChange(ends.every((end) => end === "") ? "" : ends.join(".."));
  const shown = whole ? edges.at(-1) - 1 : edges.at(-1);
  const label = `${title} from ${number(edges[0])} to ${number(shown)}, ${counts.length} bins, at most ${most} samples in one`;
  const bar = (count, i) => {
    const height = `${count ? Math.max(count / most, LEAST) * 100 : 0}%`;
    return html`<i class=${lit(i) ? "lit" : ""} style=${{ height }} title=${`${number(edges[i])}: ${count}`}></i>`;
  };
  return html`<div class="histogram" data-column=${name}>
    <div class="head">
      <span>${title}</span>
      ${range && html`<button type="button" aria-label=${`All of ${title}`} onClick=${() => onChange("")}>×</button>`}
    </div>
    <div class="bars" ref=${box} role="img" aria-label=${label} onPointerDown=${start} onPointerMove=${move}
      onPointerUp=${end} onPointerCancel=${() => setBrush(null)}>${counts.map(bar)}</div>
    <div class="ends">
      <input inputmode="decimal" aria-label=${`Least ${title}`} placeholder=${number(edges[0])} value=${least}
        onChange=${(event) => typed([event.target.value.trim(), greatest])} />
      <input inputmode="decimal" aria-label=${`Greatest ${title}`} placeholder=${number(shown)} value=${greatest}
        onChange=${(event) => typed([least, event.target.value.trim()])} />
    </div>
  </div>`;
}
