// The frame: which runs there are, which page is shown, what the keyboard does.
import { Empty, Failure, Text, address, ask, changed, go, html, ofRuns, parsed, render, runInk, useEffect, useState } from "./ui.js";
import { Overview } from "./overview.js";
import { Sample } from "./sample.js";
import { Samples } from "./samples.js";
import { Time } from "./time.js";
import { Trust } from "./trust.js";

const PAGES = { overview: ["Overview", Overview], samples: ["Samples", Samples], time: ["Time", Time], trust: ["Trust", Trust] };
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
          setState((before) => (JSON.stringify(before.runs) === JSON.stringify(runs) && !before.error ? before : { runs, error: "" }));
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

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}

function useTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const [theme, change] = useState(localStorage.getItem("theme") || (dark.matches ? "dark" : "light"));
  document.documentElement.dataset.theme = theme;
  const toggle = () => {
    const next = theme === "dark" ? "light" : "dark";
    setTheme(next);
    change(next);
  };
  return [theme, toggle];
}

function typing(event) {
  return event.target.closest?.("input, select, textarea, [contenteditable]") || event.ctrlKey || event.metaKey || event.altKey;
}

function useKeys(route, toggleTheme, setHelp) {
  useEffect(() => {
    const press = (event) => {
      if (event.key === "Escape") {
        setHelp(false);
        event.target.blur?.();
      }
      if (typing(event)) return;
      const page = Object.keys(PAGES)[Number(event.key) - 1];
      if (page) go(page, ofRuns(route.params));
      else if (event.key === "t") toggleTheme();
      else if (event.key === "?") setHelp((shown) => !shown);
      else if (event.key === "/") document.querySelector("[data-search]")?.focus();
      else if (event.key === "u" && route.page === "sample") go("samples", changed(route.params, { id: null, token: null, colour: null, start: null }));
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, [route.page, route.params.toString(), toggleTheme]);
}

function RunList({ runs, chosen, route }) {
  const toggle = (name, more) => {
    const names = chosen.map((run) => run.run);
    const next = !more ? [name] : names.includes(name) ? names.filter((each) => each !== name) : [...names, name];
    go(route.page === "sample" ? "samples" : route.page, changed(route.params, { run: next.length ? next : [name], id: null }));
  };
  return html`<nav class="runs" aria-label="Runs">
    <h2>Runs</h2>
    <ul>
      ${runs.map((run) => {
        const place = chosen.indexOf(run);
        const total = run.total ? `/${run.total}` : "";
        return html`<li class=${place >= 0 ? "chosen" : ""} key=${run.run}>
          <input type="checkbox" aria-label=${`Show ${run.run} too`} checked=${place >= 0} onChange=${() => toggle(run.run, true)}
            style=${{ accentColor: place >= 0 ? `var(--${runInk(place)})` : undefined }} />
          <button type="button" onClick=${() => toggle(run.run, false)} title=${run.run}>
            <span class="run-name"><${Text}>${run.run.split("/").slice(-2).join("/")}</${Text}></span>
            <span class="run-facts"><i class=${`state ${run.state}`}></i>${run.state}${run.steps !== undefined ? ` · ${run.steps}${total}` : ""}</span>
          </button>
        </li>`;
      })}
    </ul>
  </nav>`;
}

function Help({ close }) {
  return html`<div class="help" role="dialog" aria-label="Keys" aria-modal="true">
    <header><h2>Keys</h2><button type="button" onClick=${close}>Close</button></header>
    <dl>${KEYS.map(([keys, meaning]) => html`<dt>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${meaning}</dd>`)}</dl>
  </div>`;
}

function App() {
  const route = useRoute();
  const { runs, error } = useRuns();
  const [theme, toggleTheme] = useTheme();
  const [help, setHelp] = useState(false);
  useKeys(route, toggleTheme, setHelp);
  const wanted = route.params.getAll("run");
  const found = (runs || []).filter((run) => wanted.includes(run.run)).sort((a, b) => wanted.indexOf(a.run) - wanted.indexOf(b.run));
  const chosen = found.length ? found : (runs || []).slice(0, 1);
  const shown = route.page === "sample" ? Sample : PAGES[route.page]?.[1];
  useEffect(() => {
    document.title = `${PAGES[route.page]?.[0] || "Sample"} · ${chosen.map((run) => run.run.split("/").pop()).join(", ")} · Tandem`;
  }, [route.page, chosen.map((run) => run.run).join()]);
  return html`
    <header class="bar">
      <a class="brand" href="#/">tandem</a>
      <nav aria-label="Pages">
        ${Object.entries(PAGES).map(
          ([page, [title]]) => html`<a href=${address(page, ofRuns(route.params))}
            aria-current=${page === route.page || (page === "samples" && route.page === "sample") ? "page" : undefined}>${title}</a>`,
        )}
      </nav>
      <span class="spring"></span>
      ${chosen[0]?.state === "running" && html`<span class="live" role="status">live</span>`}
      <button type="button" class="quiet" onClick=${() => setHelp(true)} aria-label="Keys">?</button>
      <button type="button" class="quiet" onClick=${toggleTheme} aria-label=${theme === "dark" ? "Light colours" : "Dark colours"}>${theme === "dark" ? "☀" : "☾"}</button>
    </header>
    <div class="frame">
      ${runs && html`<${RunList} runs=${runs} chosen=${chosen} route=${route} />`}
      <main>
        <${Failure} error=${error} />
        ${runs && !runs.length && html`<${Empty}>No run has begun in these folders yet; it shows here as soon as one does.</${Empty}>`}
        ${chosen.filter((run) => run.error).map((run) => html`<${Failure} error=${run.error} />`)}
        ${!shown && html`<${Empty}>There is no page of this name.</${Empty}>`}
        ${shown && chosen[0] && html`<${shown} key=${route.page} runs=${chosen} route=${route} theme=${theme} />`}
      </main>
    </div>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

render(html`<${App} />`, document.body);
