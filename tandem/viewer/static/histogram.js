// A histogram of a column over the selected samples. Drag over it, or type, to choose a range.
import { html, number, useRef, useState } from "./ui.js";

const LEAST = 0.04; // least height of a bar that is not empty, so that it can be seen

export function Histogram({ name, data, range, onChange, title = name }) {
  const { edges, counts } = data;
  const box = useRef(null);
  const [brush, setBrush] = useState(null); // the bin where dragging started, and the bin under the pointer
  const [from, to] = brush ? [Math.min(...brush), Math.max(...brush)] : [];
  const most = Math.max(1, ...counts);
  const one = name === "score" ? 0 : 1; // for whole numbers, a bin ends one before the next one starts
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
    setBrush(null);
    onChange(`${edges[from]}..${edges[to + 1] - one}`);
  };
  const ends = range.includes("..") ? range.split("..") : [range, range];
  const lasts = [edges[0], edges.at(-1)];
  const [low, high] = ends.map((typed, i) => (typed === "" ? lasts[i] : Number(typed)));
  const lit = (i) => (brush ? i >= from && i <= to : edges[i + 1] > low && edges[i] <= high);
  const shown = [number(edges[0]), number(edges.at(-1) - one)];
  const typed = (place, value) => {
    const next = ends.with(place, value.trim());
    onChange(next.every((each) => each === "") ? "" : next.join(".."));
  };
  const label = `${title} from ${shown.join(" to ")}, ${counts.length} bins, at most ${most} samples in one`;
  const bar = (count, i) => {
    const height = `${count ? Math.max(count / most, LEAST) * 100 : 0}%`;
    return html`<i class=${lit(i) ? "lit" : ""} style=${{ height }} title=${`${number(edges[i])}: ${count}`}></i>`;
  };
  return html`<div class="histogram" data-column=${name}>
    <div class="head">
      <span>${title}</span>
      ${range &&
      html`<button type="button" class="bare" aria-label=${`All of ${title}`} onClick=${() => onChange("")}>×</button>`}
    </div>
    <div class="bars" ref=${box} role="img" aria-label=${label} onPointerDown=${start} onPointerMove=${move}
      onPointerUp=${end} onPointerCancel=${() => setBrush(null)}>${counts.map(bar)}</div>
    <div class="ends">
      ${["Lowest", "Highest"].map(
        (which, i) => html`<input inputmode="decimal" aria-label=${`${which} ${title}`} placeholder=${shown[i]} value=${ends[i]}
          onChange=${(event) => typed(i, event.target.value)} />`,
      )}
    </div>
  </div>`;
}
