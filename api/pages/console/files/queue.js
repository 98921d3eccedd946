// *Queue*: what waits and who works. Without the scope `admin`, only what of the caller's own waits.
import { call, isPassing, usePolled } from "./api.js";
import { html } from "./dom.js";
import { bytes, count, duration, percent, plural } from "./format.js";
import { Empty, FINAL, Text, Trouble, WORDS } from "./ui.js";

const EVERY_MS = 2_000;

export function Queue() {
  const { data, error } = usePolled((signal) => call("v1/queue", { signal }), EVERY_MS, "queue");
  const whole = data && "running_jobs" in data;
  const workers = usePolled((signal) => call("v1/workers", { signal }), EVERY_MS, whole ? "workers" : "");
  return html`<section aria-labelledby="queue-title">
    <div class="page-head"><h1 id="queue-title">Queue</h1></div>
    <${Trouble} error=${error ?? (isPassing(workers.error) && workers.error)} goesOn />
    ${!data && !error && html`<p class="hint loading">Reading…</p>`}
    ${data && html`<${Lanes} lanes=${data.lanes} />`}
    ${data && !whole && html`<p class="hint note">
      These are your own jobs. A key with the scope <code>admin</code> also sees everybody's, and the workers.
    </p>`}
    ${whole && html`<${Workers} read=${workers} /><${Totals} queue=${data} />`}
  </section>`;
}

function Lanes({ lanes }) {
  return html`<div class="tiles">
    ${Object.entries(lanes).map(
      ([lane, told]) => html`<section class="card tile lane" key=${lane} aria-label=${`Lane ${lane}`}>
        <h2>${lane}</h2>
        <p class="figure"><strong>${count(told.queued_jobs)}</strong> <span class="hint">${told.queued_jobs === 1 ? "job waits" : "jobs wait"}</span></p>
        <${Stats} stats=${laneStats(told)} />
      </section>`,
    )}
  </div>`;
}

function laneStats(told) {
  return [
    ...("oldest_age_s" in told ? [["Oldest wait", told.queued_jobs ? duration(told.oldest_age_s) : "–"]] : []),
    ["Tokens", count(told.queued_tokens)],
    ...("ready_states" in told ? [["States", count(told.ready_states)], ["Requests", bytes(told.queued_bytes)]] : []),
  ];
}

/** Figures side by side, each under its name. */
function Stats({ stats }) {
  return html`<dl class="stats">
    ${stats.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd dir="auto">${value}</dd></div>`)}
  </dl>`;
}

function Totals({ queue }) {
  const { work, finished } = queue;
  const [asked, read] = [work.tokens_asked ?? 0, work.tokens_read ?? 0];
  const states = (work.states_cached ?? 0) + (work.states_read ?? 0);
  return html`<section class="queue-part" aria-labelledby="totals-title">
    <div class="section-head"><h2 id="totals-title">Since the start</h2></div>
    <div class="card"><${Stats} stats=${[
      ...Object.entries(WORDS)
        .filter(([status]) => FINAL.includes(status))
        .map(([status, word]) => [word, count(finished[status] ?? 0)]),
      ["Tokens asked", count(asked)],
      ["Tokens read", count(read)],
      ["Saved", asked ? percent(Math.max(0, 1 - read / asked)) : "–"],
      ["States cached", states ? percent((work.states_cached ?? 0) / states) : "–"],
    ]} /></div>
  </section>`;
}

function Workers({ read: { data, error } }) {
  return html`<section class="queue-part" aria-labelledby="workers-title">
    <div class="section-head"><h2 id="workers-title">Workers</h2></div>
    <${Trouble} error=${!isPassing(error) && error} />
    ${data && !data.data.length && html`<${Empty} title="No worker has shown itself">
      Start one with <code>d3serve worker</code>: jobs wait until then.
    <//>`}
    ${data?.data.map((worker) => html`<${Worker} key=${worker.id} worker=${worker} />`)}
  </section>`;
}

function Worker({ worker }) {
  const { model } = worker;
  const stats = [
    ["Model", model ? model.name : "–"],
    ["Revision", model?.revision ? html`<span class="mono" title=${model.revision}>${model.revision.slice(0, 12)}</span>` : "–"],
    ["On", model ? `${model.device}, ${model.dtype}` : "–"],
    ["Lanes", worker.lanes.join(", ") || "–"],
    ["Speed", worker.tokens_per_s ? `${count(worker.tokens_per_s)} tokens/s` : "–"],
    [worker.memory_total_bytes ? "GPU memory" : "Memory", share(worker.memory_bytes, worker.memory_total_bytes)],
    ["Host memory, peak", share(worker.peak_memory_bytes)],
    ["Cached states", count(worker.cached_states)],
    ["State cache", worker.cache_size_bytes ? share(worker.cached_bytes, worker.cache_size_bytes) : "–"],
  ];
  return html`<section class="card worker" aria-label=${`Worker ${worker.id}`}>
    <div class="worker-head">
      <span class=${`status status-${look(worker)}`}><i aria-hidden="true"></i>${doing(worker)}</span>
      <${Text} class="mono worker-id" value=${worker.id} />
    </div>
    ${worker.error && html`<${Text} as="p" class="trouble" value=${worker.error} />`}
    <${Stats} stats=${stats} />
  </section>`;
}

/** How much memory, and of how much, as far as that is known. */
function share(used, total) {
  if (used === null) return "–";
  return total ? `${bytes(used)} of ${bytes(total)}` : bytes(used);
}

function look(worker) {
  if (worker.load === "failed") return "failed";
  if (worker.load === "loading") return "queued";
  return worker.running_jobs ? "running" : "succeeded";
}

function doing(worker) {
  if (worker.load === "failed") return "Could not load its model";
  if (worker.load === "loading") return "Loads its model";
  return worker.running_jobs ? `Runs ${plural(worker.running_jobs, "job")}` : "Waits for work";
}
