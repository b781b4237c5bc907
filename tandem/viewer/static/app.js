// The frame: which runs there are, which page is shown, what the keyboard does.
import { Overview } from "./overview.js";
import { OF_ONE, Sample } from "./sample.js";
import { Samples } from "./samples.js";
import { Time } from "./time.js";
import { Trust } from "./trust.js";
import {
  Empty, Failure, Guarded, Pairs, address, ask, changed, go, html, ofRuns, parsed, render, runInk, text, useEffect,
  useKeys, useState,
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
  ["j k", "next and previous sample; on Time, step"],
  ["Enter", "open the sample"],
  ["← →", "move over tokens"],
  ["u", "back to the list of samples"],
  ["t", "dark or light"],
  ["?", "these keys"],
];

function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const update = () => setHash(location.hash);
    window.addEventListener("hashchange", update);
    window.addEventListener("popstate", update);
    return () => {
      window.removeEventListener("hashchange", update);
      window.removeEventListener("popstate", update);
    };
  }, []);
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
    const next = { dark: "light", light: "dark" }[theme];
    localStorage.setItem("theme", next);
    change(next);
  };
  return [theme, toggle];
}

function useEscape(close) {
  useEffect(() => {
    const press = (event) => {
      if (event.key !== "Escape") return;
      close();
      event.target.blur?.();
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, []);
}

function RunList({ runs, chosen, route }) {
  const { page, params } = route;
  const names = chosen.map((run) => run.run);
  const show = (run) => go(page === "sample" ? "samples" : page, changed(params, { run, id: null }));
  const toggle = (name) => {
    const next = names.includes(name) ? names.filter((each) => each !== name) : [...names, name];
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
          <button type="button" onClick=${() => show(run.run)} title=${run.run}>
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

function Bar({ route, live, theme, toggleTheme, help }) {
  const here = route.page === "sample" ? "samples" : route.page;
  return html`<header class="bar">
    <a class="brand" href="#/">tandem</a>
    <nav aria-label="Pages">
      ${[...PAGES].map(
        ([page, [title]]) => html`<a href=${address(page, ofRuns(route.params))}
          aria-current=${page === here ? "page" : undefined}>${title}</a>`,
      )}
    </nav>
    <span class="spring"></span>
    ${live && html`<span class="live" role="status">live</span>`}
    <button type="button" class="quiet" onClick=${help} aria-label="Keys">?</button>
    <button type="button" class="quiet" onClick=${toggleTheme} aria-label=${theme === "dark" ? "Light colours" : "Dark colours"}>
      ${theme === "dark" ? "☀" : "☾"}
    </button>
  </header>`;
}

function App() {
  const route = useRoute();
  const { runs, error } = useRuns();
  const [theme, toggleTheme] = useTheme();
  const [help, setHelp] = useState(false);
  const { page, params } = route;
  useEscape(() => setHelp(false));
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
  const wanted = params.getAll("run");
  const found = wanted.flatMap((name) => (runs || []).filter((run) => run.run === name));
  const chosen = found.length ? found : (runs || []).slice(0, 1);
  const [title, shown] = page === "sample" ? ["Sample", Sample] : PAGES.get(page) || ["", null];
  const names = chosen.map((run) => run.run.split("/").pop()).join(", ");
  useEffect(() => {
    document.title = `${title} · ${names} · Tandem`;
  }, [title, names]);
  const none = "No run has begun in these folders yet; it shows here as soon as one does.";
  return html`<${Bar} route=${route} live=${chosen[0]?.state === "running"} theme=${theme} toggleTheme=${toggleTheme}
      help=${() => setHelp(true)} />
    <div class="frame">
      ${runs && html`<${RunList} runs=${runs} chosen=${chosen} route=${route} />`}
      <main>
        <${Failure} error=${error} />
        ${runs && !runs.length && html`<${Empty}>${none}</${Empty}>`}
        ${chosen.map((run) => html`<${Failure} error=${run.error} />`)}
        ${!shown && html`<${Empty}>There is no page of this name.</${Empty}>`}
        ${shown &&
        chosen[0] &&
        html`<${Guarded} key=${`${page} ${names}`}><${shown} runs=${chosen} route=${route} theme=${theme} /></${Guarded}>`}
      </main>
    </div>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

render(html`<${App} />`, document.body);
