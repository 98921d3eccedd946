// The frame of the console: which page the address names, the key of this tab, what is served.
import { Ask } from "./ask.js";
import { call, key, usePolled } from "./api.js";
import { html, render, useLayoutEffect, useRef, useState } from "./dom.js";
import { Job } from "./job.js";
import { Jobs } from "./jobs.js";
import { Queue } from "./queue.js";
import { Dialog, Field } from "./ui.js";

const PAGES = [["ask", "Ask"], ["jobs", "Jobs"], ["queue", "Queue"]];
const MODELS_EVERY_MS = 10_000;

function App() {
  const { page, id, query } = useRoute();
  const { data, error } = usePolled((signal) => call("v1/models", { signal }), MODELS_EVERY_MS, "models");
  const [typing, setTyping] = useState(false);
  const main = useRef();
  const first = useRef(true);
  const locked = error?.status === 401;
  useLayoutEffect(() => { // an effect, after the next frame, would take the focus from who types already
    document.title = `${id ?? PAGES.find(([name]) => name === page)[1]} · d3serve`;
    if (!first.current) main.current.focus(); // who listens hears the new page, and not the old one's end
    first.current = false;
    window.scrollTo(0, 0);
  }, [page, id]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => skip(event, main)}>Skip to the page</a>
    <header class="bar-top">
      <div class="bar-inner">
        <a class="brand" href="#/ask"><${Mark} />d3serve</a>
        <nav aria-label="Pages">${PAGES.map(
          ([name, text]) => html`<a key=${name} href=${`#/${name}`} aria-current=${name === page ? "page" : undefined}>${text}</a>`,
        )}</nav>
        <${Served} models=${data?.models} error=${error} />
        <button type="button" class="quiet" onClick=${() => setTyping(true)}>${key.get() ? "Key ✓" : "Key"}</button>
      </div>
    </header>
    <main id="main" tabindex="-1" ref=${main}>
      ${locked ? html`<${Locked} wrong=${Boolean(key.get())} onOpen=${() => setTyping(true)} />` : html`<${Page} page=${page} id=${id} query=${query} models=${data?.models ?? []} />`}
    </main>
    ${typing && html`<${KeyEntry} onClose=${() => setTyping(false)} />`}
  `;
}

function Page({ page, id, query, models }) {
  switch (page) {
    case "jobs":
      return id ? html`<${Job} key=${id} id=${id} go=${go} />` : html`<${Jobs} query=${query} go=${go} />`;
    case "queue":
      return html`<${Queue} />`;
    default:
      return html`<${Ask} models=${models} />`;
  }
}

function go(hash) {
  location.hash = hash;
}

/** The address after its `#`: `/jobs/<id>` or `/jobs?status=failed`. */
function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useLayoutEffect(() => { // before anybody can follow a link: an effect would listen only after the next frame
    const told = () => setHash(location.hash);
    addEventListener("hashchange", told);
    return () => removeEventListener("hashchange", told);
  }, []);
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const [page, id] = path.split("/");
  const known = PAGES.some(([name]) => name === page);
  return { page: known ? page : "ask", id: known && id ? decoded(id) : undefined, query: new URLSearchParams(query) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function skip(event, main) {
  event.preventDefault(); // the part after `#` names the page
  main.current.focus();
}

function Mark() {
  return html`<svg class="mark" viewBox="0 0 16 16" aria-hidden="true">
    <rect x="1" y="2" width="14" height="3" rx="1.5" /><rect x="1" y="6.5" width="9" height="3" rx="1.5" opacity=".7" />
    <rect x="1" y="11" width="5" height="3" rx="1.5" opacity=".45" />
  </svg>`;
}

const TOLD = { 0: "No connection", 401: "Needs a key", 429: "Asks for patience", 503: "Not ready" };

function Served({ models, error }) {
  const look = error ? "failed" : models?.length ? "succeeded" : "queued";
  const told = error ? TOLD[error.status] ?? "Refused" : models?.length ? models[0].name : models && "No model loaded";
  return html`<span class=${`served status status-${look}`} role="status">${told && html`<i aria-hidden="true"></i><span dir="auto">${told}</span>`}</span>`;
}

function Locked({ wrong, onOpen }) {
  return html`<div class="empty locked">
    <h1>${wrong ? "This key is not known here" : "This server asks for a key"}</h1>
    <p>Make one with <code>d3serve new-key keys.jsonl --tenant you</code>.</p>
    <button type="button" class="primary" onClick=${onOpen}>Enter a key</button>
  </div>`;
}

function KeyEntry({ onClose }) {
  const enter = (event) => {
    event.preventDefault();
    key.set(new FormData(event.currentTarget).get("key").trim());
    onClose();
  };
  return html`<${Dialog} title="API key" onClose=${onClose}>
    <form onSubmit=${enter}>
      <${Field} label="Key">
        <input name="key" type="password" autocomplete="off" spellcheck="false" autofocus aria-describedby="key-kept" />
      <//>
      <p id="key-kept" class="hint">Kept in this tab, and forgotten when you close it.</p>
      <div class="actions end">
        <button type="button" onClick=${onClose}>Cancel</button>
        ${key.get() && html`<button type="button" onClick=${() => (key.set(""), onClose())}>Forget it</button>`}
        <button class="primary">Use it</button>
      </div>
    </form>
  <//>`;
}

render(html`<${App} />`, document.getElementById("app"));
