// *Jobs*: the caller's jobs, newest first, a page at a time.
import { call, usePolled } from "./api.js";
import { html, useState } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { Empty, FINAL, Field, Status, Text, Time, Trouble, WORDS } from "./ui.js";

const PAGE = 25;
const LIVE_MS = 2_000;
const QUIET_MS = 5_000; // nothing on the page can change but by new jobs
const SINCE = [["", "Any time"], ["3600", "Last hour"], ["86400", "Last day"], ["604800", "Last week"]];

/** `query` is what stands in the address, so that a filtered page can be kept and sent. */
export function Jobs({ query, go }) {
  const filters = query.toString();
  const [turned, setTurned] = useState({ filters, cursors: [""] });
  const cursors = turned.filters === filters ? turned.cursors : [""]; // those of other filters lead nowhere
  const turn = (to) => setTurned({ filters, cursors: to });
  const cursor = cursors.at(-1);
  const path = pathOf(query, cursor);
  const everyMs = (data) => (data?.data.some((job) => !job.done) ? LIVE_MS : QUIET_MS);
  const { data, error } = usePolled((signal) => call(path(), { signal }), everyMs, `${filters} ${cursor}`);
  const filter = (name, value) => {
    const next = new URLSearchParams(query);
    if (value) next.set(name, value);
    else next.delete(name);
    go(`#/jobs${next.size ? `?${next}` : ""}`);
  };
  return html`<section aria-labelledby="jobs-title">
    <div class="page-head"><h1 id="jobs-title">Jobs</h1></div>
    <${Filters} query=${query} filter=${filter} go=${go} />
    <${Trouble} error=${error} goesOn />
    ${data && (data.data.length ? html`<${Table} jobs=${data.data} />` : html`<${None} filtered=${filters} more=${data.has_more} />`)}
    ${!data && !error && html`<p class="hint loading">Reading…</p>`}
    <${Pager} page=${cursors.length} more=${data?.cursor}
      newer=${() => turn(cursors.slice(0, -1))} older=${() => turn([...cursors, data.cursor])} />
  </section>`;
}

/** The path to ask for, at each time: “the last hour” moves on. */
function pathOf(query, cursor) {
  return () => {
    const asked = new URLSearchParams({ limit: PAGE });
    for (const name of ["status", "model"]) if (query.get(name)) asked.set(name, query.get(name));
    if (query.get("since")) asked.set("created_after", Date.now() / 1000 - Number(query.get("since")));
    const [name, ...value] = (query.get("metadata") ?? "").split("=");
    if (name.trim()) asked.set(`metadata[${name.trim()}]`, value.join("=").trim());
    if (cursor) asked.set("cursor", cursor);
    return `v1/jobs?${asked}`;
  };
}

function Filters({ query, filter, go }) {
  const select = (name, options) => html`<select value=${query.get(name) ?? ""} onChange=${(event) => filter(name, event.currentTarget.value)}>
    ${options.map(
      ([value, text]) => html`<option key=${value} value=${value} selected=${value === (query.get(name) ?? "")}>${text}</option>`,
    )}
  </select>`;
  const typed = (name, placeholder) => html`<input type="search" dir="auto" placeholder=${placeholder} value=${query.get(name) ?? ""}
    onChange=${(event) => filter(name, event.currentTarget.value.trim())} />`;
  const open = (event) => {
    event.preventDefault();
    const id = new FormData(event.currentTarget).get("id").trim();
    if (id) go(`#/jobs/${encodeURIComponent(id)}`);
  };
  return html`<div class="filters">
    <${Field} label="Status">${select("status", [["", "All"], ...Object.entries(WORDS)])}<//>
    <${Field} label="Created">${select("since", SINCE)}<//>
    <${Field} label="Model">${typed("model", "any")}<//>
    <${Field} label="Metadata">${typed("metadata", "key=value")}<//>
    <form class="opener" onSubmit=${open}>
      <${Field} label="Open by ID"><input name="id" type="search" placeholder="job_…" spellcheck="false" /><//>
    </form>
  </div>`;
}

function Table({ jobs }) {
  return html`<table class="table jobs">
    <thead>
      <tr>
        <th scope="col">Status</th><th scope="col">Job</th><th scope="col">Model</th><th scope="col">Lane</th>
        <th scope="col" class="number">Questions</th><th scope="col" class="number">State</th>
        <th scope="col" class="number">Time</th><th scope="col" class="number">Created</th>
      </tr>
    </thead>
    <tbody>${jobs.map((job) => html`<${Row} key=${job.id} job=${job} />`)}</tbody>
  </table>`;
}

function Row({ job }) {
  return html`<tr>
    <td class="cell-status"><${Status} value=${job.status} />${job.progress.fraction > 0 && !job.done &&
    html`<span class="hint"> ${Math.round(100 * job.progress.fraction)}%</span>`}</td>
    <td class="cell-id"><a class="stretched mono" href=${`#/jobs/${job.id}`}>${job.id}</a></td>
    <td class="cell-model"><${Text} value=${job.request.model} /></td>
    <td class="cell-lane">${job.request.lane}</td>
    <td class="number cell-questions">${count(job.request.questions)}<span class="phone"> ${job.request.questions === 1 ? "question" : "questions"}</span></td>
    <td class="number cell-state" title="tokens of the state">${count(job.request.state_tokens)}<span class="phone"> tokens</span></td>
    <td class="number cell-time">${job.done ? duration(job.finished_at - job.created_at) : "–"}</td>
    <td class="number cell-created"><${Time} at=${job.created_at} /></td>
  </tr>`;
}

function None({ filtered, more }) {
  if (more) return html`<${Empty} title="None on this page">The filters match little; go on to older jobs.<//>`;
  if (filtered) return html`<${Empty} title="No job matches">Try other filters, or <a href="#/jobs">show all jobs</a>.<//>`;
  return html`<${Empty} title="No jobs yet"><a href="#/ask">Ask something</a>, or send a job over the API: it appears here.<//>`;
}

function Pager({ page, more, newer, older }) {
  if (page === 1 && !more) return null;
  return html`<nav class="pager" aria-label="Pages of jobs">
    <button type="button" onClick=${newer} disabled=${page === 1}>Newer</button>
    <span class="hint" aria-live="polite">Page ${page}</span>
    <button type="button" onClick=${older} disabled=${!more}>Older</button>
  </nav>`;
}
