// *Job*: one job as it goes: its time line, its progress, its answers, its webhook's deliveries.
import { Answers, Facts, Usage } from "./answers.js";
import { call, isPassing, key } from "./api.js";
import { Asked, instructionsOf, useAsked } from "./asked.js";
import { Deliveries, useDeliveries } from "./deliveries.js";
import { html, useCallback, useEffect, useState } from "./dom.js";
import { draftOf, replaceDraft } from "./draft.js";
import { follow } from "./follow.js";
import { count, duration, moment, plural } from "./format.js";
import { Confirm, Copy, Progress, Status, Text, Time, Trouble } from "./ui.js";

const GONE = 410;

export function Job({ id, go }) {
  const { job, passMs, error, lost, again } = useJob(id);
  const act = useActions(id, again, go);
  const read = useAsked(id, Boolean(job));
  const deliveries = useDeliveries(id, job);
  const outage = [lost, read.error, deliveries.error].find(isPassing); // one meets every part of the page: said once
  return html`<article class="job" aria-labelledby="job-title">
    <a class="back" href="#/jobs">Jobs</a>
    <div class="page-head">
      <div class="job-name"><h1 id="job-title" class="mono">${id}</h1><${Copy} text=${id} label="Copy" /></div>
      ${job && html`<${Actions} job=${job} act=${act} asked=${read.asked} go=${go} />`}
    </div>
    <${Trouble} error=${act.error ?? error} />
    <${Trouble} error=${outage} goesOn />
    ${!job && !error && !outage && html`<p class="hint loading">Reading…</p>`}
    ${job && html`<${Life} job=${job} passMs=${passMs} />`}
    ${job?.error && html`<${Failure} error=${job.error} />`}
    ${job && html`<div class="job-columns">
      <section aria-labelledby="job-answers" class="card">
        <div class="section-head"><h2 id="job-answers">Answers</h2></div>
        ${job.result ? html`<${Answers} answers=${job.result.answers} asked=${instructionsOf(read.asked)} />` : html`<p class="hint">${without(job)}</p>`}
      </section>
      <div class="job-side">
        <${Summary} job=${job} />
        <${Asked} read=${read} />
        ${job.result && html`<section class="card" aria-labelledby="job-usage">
          <div class="section-head"><h2 id="job-usage">Usage</h2></div>
          <${Usage} usage=${job.result.usage} model=${job.result.model} />
        </section>`}
      </div>
    </div>`}
    <${Deliveries} read=${deliveries} />
  </article>`;
}

const without = (job) => (job.done ? "This job has no answers." : "They appear here as soon as the job is done.");

/** The job, followed until it is done; `again` reads it anew, as after a retry. */
function useJob(id) {
  const [known, setKnown] = useState({});
  const [times, setTimes] = useState(0);
  const again = useCallback(() => setTimes((before) => before + 1), []);
  useEffect(() => {
    const ended = new AbortController();
    const { signal } = ended;
    const tell = (fields) => signal.aborted || setKnown((before) => ({ ...before, error: undefined, ...fields }));
    const fail = (error) => tell({ error, lost: undefined, ...(error.status === GONE && { job: undefined }) });
    follow(id, { signal, tell }).catch(fail);
    return () => ended.abort();
  }, [id, times]);
  useEffect(() => key.watch(again), [again]);
  return { ...known, again };
}

function useActions(id, again, go) {
  const [error, setError] = useState();
  const path = `v1/jobs/${encodeURIComponent(id)}`;
  const doing = (method, where, then) => async () => {
    try {
      setError(undefined);
      await call(path + where, { method });
      then();
    } catch (problem) {
      setError(problem);
    }
  };
  return {
    error,
    cancel: doing("POST", "/cancel", again),
    retry: doing("POST", "/retry", again),
    erase: doing("DELETE", "", () => go("#/jobs")),
  };
}

function Actions({ job, act, asked, go }) {
  const [asking, setAsking] = useState(false);
  const retryable = ["failed", "expired", "canceled"].includes(job.status);
  const askAgain = () => {
    replaceDraft(draftOf(asked, job.request));
    go("#/ask");
  };
  return html`<div class="actions">
    ${asked && html`<button type="button" onClick=${askAgain}>Ask this again</button>`}
    ${!job.done && html`<button type="button" onClick=${act.cancel}>Cancel</button>`}
    ${retryable && html`<button type="button" class="primary" onClick=${act.retry}>Retry</button>`}
    ${job.status !== "running" && html`<button type="button" class="danger" onClick=${() => setAsking(true)}>Delete</button>`}
    ${asking && html`<${Confirm} title="Delete this job?" action="Delete" onClose=${() => setAsking(false)}
      onConfirm=${() => {
        setAsking(false);
        act.erase();
      }}>
      Its input, its answers and what its webhook deliveries hold are erased. This cannot be undone.
    <//>`}
  </div>`;
}

// --- its life --------------------------------------------------------------------------------------

function Life({ job, passMs }) {
  const now = useNow(!job.done);
  const started = job.started_at && job.status !== "queued" ? job.started_at : undefined;
  const waited = (started ?? (job.done ? job.finished_at : now)) - job.created_at;
  const ran = started && (job.done ? job.finished_at : now) - started;
  const { fraction, eta_s: left } = job.progress;
  return html`<section class="card life" aria-label="Time line">
    <ol class="steps">
      <${Step} state=${started || job.done ? "past" : "now"} title="Queued" at=${job.created_at}
        note=${waiting(job, waited)} />
      <${Step} state=${job.status === "running" ? "now" : started ? "past" : "ahead"} title="Pass" at=${started}
        note=${started ? `${duration(ran)} ${job.done ? "in all" : "so far"}${passMs ? `, ${duration(passMs / 1000)} of it in the engine` : ""}` : "not started"} />
      <${Step} state=${job.done ? `past end-${job.status}` : "ahead"} title=${job.done ? html`<${Status} value=${job.status} />` : "Done"}
        at=${job.finished_at} note=${job.done ? `${duration(job.finished_at - job.created_at)} after it was sent` : ""} />
    </ol>
    ${job.status === "running" && html`<${Progress} label="Progress of the job" value=${fraction}
      note=${fraction ? `${Math.round(100 * fraction)}%${left ? `, about ${duration(left)} left` : ""}` : job.progress.stage} />`}
    <p class="unseen" role="status">${job.done ? `The job ${job.status}.` : `The job is ${job.status}.`}</p>
  </section>`;
}

function waiting(job, waited) {
  if (job.status !== "queued") return `${duration(waited)} in the queue`;
  const { position, eta_s: eta } = job.queue ?? {};
  const place = position ? `, behind ${plural(position, "job")}` : "";
  return `${duration(waited)} so far${place}${eta ? `, about ${duration(eta)} to go` : ""}`;
}

function Step({ state, title, at, note }) {
  return html`<li class=${`step step-${state}`} aria-current=${state === "now" ? "step" : undefined}>
    <span class="step-title">${title}</span>
    <span class="hint">${at ? html`<time datetime=${new Date(1000 * at).toISOString()}>${moment(at)}</time>` : ""}</span>
    <span class="step-note">${note}</span>
  </li>`;
}

function useNow(running) {
  const [now, setNow] = useState(Date.now() / 1000);
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(() => setNow(Date.now() / 1000), 500);
    return () => clearInterval(timer);
  }, [running]);
  return now;
}

function Failure({ error }) {
  return html`<section class="card failure" aria-labelledby="failure-title">
    <h2 id="failure-title">Why there is no answer</h2>
    <${Text} as="p" value=${error.message} />
    <p class="hint">
      <code>${error.code}</code>${error.field && html` · <${Text} as="code" value=${error.field} />`}
      ${" · "}${error.retryable ? "Trying again may help." : "The same request would fail again."}
    </p>
  </section>`;
}

function Summary({ job }) {
  const { request } = job;
  const facts = [
    ["Model", request.revision ? `${request.model}@${request.revision}` : request.model],
    ["Lane", request.lane],
    ["Priority", request.priority],
    ["Questions", count(request.questions)],
    ["State", `${job.result ? "" : "about "}${count(request.state_tokens)} tokens`],
    ["Attempt", count(job.attempt)],
    ["Created", html`<${Time} at=${job.created_at} />`],
    ...(job.expires_at ? [["Kept until", moment(job.expires_at)]] : []),
  ];
  const metadata = Object.entries(job.metadata);
  return html`<section class="card" aria-labelledby="job-request">
    <div class="section-head"><h2 id="job-request">Request</h2></div>
    <${Facts} facts=${facts} />
    ${metadata.length > 0 && html`<h3 class="label">Metadata</h3><${Facts} facts=${metadata} />`}
  </section>`;
}
