// The frame of the page: the list of runs, the choice of the page, and the keys.
import { Overview } from "./overview.js";
import { OF_ONE, Sample } from "./sample.js";
import { Samples } from "./samples.js";
import { Time } from "./time.js";
import { Trust } from "./trust.js";
import {
  Empty, Failure, Guarded, Pairs, address, ask, changed, go, html, ofRuns, parsed, render, runInk, text, toggled, useEffect,
  useKeys, useListener, useState,
} from "./ui.js";

const PAGES = new Map([
  ["overview", ["Overview", Overview]],
  ["samples", ["Samples", Samples]],
  ["time", ["Time", Time]],
  ["trust", ["Trust", Trust]],
]);
const LOOK_MS = 2000;
const KEYS = [
  ["1 2 3 4", "Overview, Samples, Time, Trust"],
  ["/", "search"],
  ["j k", "next and previous sample (on Time: step)"],
  ["Enter", "open the sample"],
  ["← →", "move over tokens"],
  ["u", "back to the list of samples"],
  ["t", "dark or light"],
  ["?", "show these keys"],
];

function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useListener(["hashchange", "popstate"], () => setHash(location.hash));
  return parsed(hash);
}

function useRuns() {
  const [state, setState] = useState({ runs: null, error: "" });
  useEffect(() => {
    let timer = 0;
    const look = async () => {
      try {
        if (!document.hidden) {
          const runs = await ask("runs", {});
          setState((before) =>
            JSON.stringify(before.runs) === JSON.stringify(runs) && !before.error ? before : { runs, error: "" },
          );
        }
      } catch (error) {
        setState((before) => ({ ...before, error: `The viewer does not answer: ${error.message}` }));
      }
      timer = setTimeout(look, LOOK_MS);
    };
    look();
    return () => clearTimeout(timer);
  }, []);
  return state;
}

function useTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const [theme, change] = useState(localStorage.getItem("theme") || system);
  document.documentElement.dataset.theme = theme;
  const toggle = () => {
    const next = theme === "dark" ? "light" : "dark";
    localStorage.setItem("theme", next);
    change(next);
  };
  return [theme, toggle];
}

function RunList({ runs, chosen, page, params }) {
  const names = chosen.map((run) => run.run);
  const show = (run) => go(page === "sample" ? "samples" : page, changed(params, { run, id: null }));
  const toggle = (name) => {
    const next = toggled(names, name);
    show(next.length ? next : name);
  };
  return html`<nav class="runs" aria-label="Runs">
    <h2>Runs</h2>
    <ul>
      ${runs.map((run) => {
        const place = names.indexOf(run.run);
        const accentColor = place >= 0 ? `var(--${runInk(place)})` : undefined;
        const done = run.steps === undefined ? "" : ` · ${run.steps}${run.total ? `/${run.total}` : ""}`;
        return html`<li class=${place >= 0 ? "chosen" : ""} key=${run.run}>
          <input type="checkbox" aria-label=${`Show ${run.run} too`} checked=${place >= 0} style=${{ accentColor }}
            onChange=${() => toggle(run.run)} />
          <button type="button" class="bare" onClick=${() => show(run.run)} title=${run.run}>
            <span class="run-name">${text(run.run.split("/").slice(-2).join("/"))}</span>
            <span class="run-facts"><i class=${`state ${run.state}`}></i>${run.state}${done}</span>
          </button>
        </li>`;
      })}
    </ul>
  </nav>`;
}

function Help({ close }) {
  const pairs = KEYS.map(([keys, meaning]) => [keys.split(" ").map((key) => html`<kbd>${key}</kbd> `), meaning]);
  return html`<div class="help" role="dialog" aria-label="Keys" aria-modal="true">
    <header><h2>Keys</h2><button type="button" onClick=${close}>Close</button></header>
    <${Pairs} pairs=${pairs} />
  </div>`;
}

function Bar({ page, params, live, theme, toggleTheme, help }) {
  const here = page === "sample" ? "samples" : page;
  return html`<header class="bar">
    <a class="brand" href="#/">tandem</a>
    <nav aria-label="Pages">
      ${[...PAGES].map(
        ([name, [title]]) => html`<a href=${address(name, ofRuns(params))}
          aria-current=${name === here ? "page" : undefined}>${title}</a>`,
      )}
    </nav>
    <span class="spring"></span>
    ${live && html`<span class="note live" role="status">live</span>`}
    <button type="button" class="quiet" onClick=${help} aria-label="Keys">?</button>
    <button type="button" class="quiet" onClick=${toggleTheme} aria-label=${theme === "dark" ? "Light colours" : "Dark colours"}>
      ${theme === "dark" ? "☀" : "☾"}
    </button>
  </header>`;
}

function App() {
  const { page, params } = useRoute();
  const { runs, error } = useRuns();
  const [theme, toggleTheme] = useTheme();
  const [help, setHelp] = useState(false);
  useListener(["keydown"], (event) => {
    if (event.key !== "Escape") return;
    setHelp(false);
    event.target.blur?.();
  });
  useKeys((key, event) => {
    const target = [...PAGES.keys()][Number(key) - 1];
    if (target) go(target, ofRuns(params));
    else if (key === "t") toggleTheme();
    else if (key === "?") setHelp(!help);
    else if (key === "/") document.querySelector("[data-search]")?.focus();
    else if (key === "u" && page === "sample") go("samples", changed(params, OF_ONE));
    else return;
    event.preventDefault();
  });
  const found = params.getAll("run").flatMap((name) => (runs || []).filter((run) => run.run === name));
  const chosen = found.length ? found : (runs || []).slice(0, 1);
  const [run] = chosen;
  const [title, shown] = page === "sample" ? ["Sample", Sample] : PAGES.get(page) || ["", null];
  const names = chosen.map((each) => each.run.split("/").pop()).join(", ");
  useEffect(() => {
    document.title = `${title} · ${names} · Tandem`;
  }, [title, names]);
  const set = (changes) => go(page, changed(parsed(location.hash).params, changes), { replace: true });
  const none = "There is no run in these folders yet. A run appears here as soon as it starts.";
  return html`<${Bar} page=${page} params=${params} live=${run?.state === "running"} theme=${theme} toggleTheme=${toggleTheme}
      help=${() => setHelp(true)} />
    <div class="frame">
      ${runs && html`<${RunList} runs=${runs} chosen=${chosen} page=${page} params=${params} />`}
      <main>
        <${Failure} error=${error} />
        ${runs && !run && html`<${Empty}>${none}</${Empty}>`}
        ${chosen.map((each) => html`<${Failure} error=${each.error} />`)}
        ${!shown && html`<${Empty}>There is no page of this name.</${Empty}>`}
        ${shown &&
        run &&
        html`<${Guarded} key=${`${page} ${names}`}>
          ${shown !== Sample && html`<h1 class="unseen">${title}</h1>`}
          <${shown} run=${run} runs=${chosen} params=${params} set=${set} theme=${theme} />
        </${Guarded}>`}
      </main>
    </div>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

render(html`<${App} />`, document.body);
