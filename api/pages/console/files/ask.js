// *Ask*: word a request, send it, see the answers, copy the same request as code.
import { call } from "./api.js";
import { Answers, Usage } from "./answers.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { EXAMPLE, bringBack, changeDraft, replaceDraft, replaced, useDraft } from "./draft.js";
import { follow } from "./follow.js";
import { count, duration, plural } from "./format.js";
import { write } from "./json.js";
import { Pictures } from "./pictures.js";
import { Questions } from "./questions.js";
import { asCommand, asCurl, asPython, nameOf, requestOf } from "./request.js";
import { Area, Beginning, Copy, Empty, Field, Progress, Segmented, Trouble } from "./ui.js";

export function Ask({ models }) {
  const draft = useDraft();
  const run = useRun();
  const change = (fields) => changeDraft(() => fields);
  const model = models.find((one) => one.name === draft.model) ?? models[0];
  const submit = (event) => {
    event.preventDefault();
    if (!run.active) run.start(draft, model?.name ?? "jev-latest");
  };
  const press = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  };
  return html`<div class="ask">
    <form class="ask-form" onSubmit=${submit} onKeyDown=${press} novalidate>
      <div class="page-head">
        <h1>Ask</h1>
        <div class="actions">
          ${replaced() && html`<button type="button" class="quiet" onClick=${bringBack}>Bring back what stood here</button>`}
          <button type="button" class="quiet" onClick=${() => replaceDraft(EXAMPLE())}>Fill in an example</button>
        </div>
      </div>
      <${State} draft=${draft} change=${change} model=${model} />
      <${Questions} questions=${draft.questions} onChange=${(questions) => change({ questions })} />
      <${More} draft=${draft} change=${change} models=${models} model=${model} />
      <div class="actions">
        <button class="primary" disabled=${run.active}>${run.active ? "Asking…" : "Ask"}</button>
        ${run.active && html`<button type="button" onClick=${run.cancel}>Cancel</button>`}
        <span class="hint keys"><kbd>Ctrl</kbd> <kbd>Enter</kbd></span>
      </div>
    </form>
    <div class="ask-side">
      <${Outcome} run=${run} />
      <${Code} draft=${draft} model=${model?.name ?? "jev-latest"} />
    </div>
  </div>`;
}

function State({ draft, change, model }) {
  const kinds = [["text", "Text"], ["json", "JSON"]];
  const limit = model?.limits.tokens_per_question;
  return html`<section aria-labelledby="state-title">
    <div class="section-head">
      <h2 id="state-title">State</h2>
      <${Segmented} label="The state is" name="state-kind" options=${kinds} value=${draft.stateKind}
        onChange=${(stateKind) => change({ stateKind })} />
    </div>
    <div class="card">
      <${Area} class=${draft.stateKind === "json" ? "code" : ""} aria-labelledby="state-title" rows=${5}
        value=${draft.state} onInput=${(state) => change({ state })} spellcheck=${draft.stateKind === "text"}
        placeholder=${draft.stateKind === "text" ? "What the questions are about" : '{"subject": "…", "body": "…"}'} />
      <div class="card-foot hint">
        ${[
          plural(draft.state.length, "character"),
          limit && `at most ${count(limit)} tokens`,
          draft.stateKind === "text" && "text of strangers is safer as JSON",
        ].filter(Boolean).join(" · ")}
      </div>
    </div>
    ${draft.lacks > draft.files.length && html`<p class="hint lacks">
      The job also showed ${plural(draft.lacks, "file")}, which the server does not give back: add what is missing.
    </p>`}
    <${Pictures} files=${draft.files} model=${model} />
  </section>`;
}

function More({ draft, change, models, model }) {
  const input = (name) => ({ value: draft[name], onInput: (event) => change({ [name]: event.currentTarget.value }) });
  const select = (name, value, options) => html`<select value=${value} onChange=${(event) => change({ [name]: event.currentTarget.value })}>
    ${options.map(([option, text]) => html`<option key=${option} value=${option} selected=${option === value}>${text}</option>`)}
  </select>`;
  const lanes = [["", "by its size"], ["interactive", "interactive"], ["offline", "offline"]];
  const priorities = ["high", "normal", "low"].map((one) => [one, one]);
  return html`<details class="more settings">
    <summary>Model, lane, priority, webhook</summary>
    <div class="pair">
      <${Field} label="Model">${select("model", model?.name ?? "", models.map((one) => [one.name, one.name]))}<//>
      <${Field} label="Lane">${select("lane", draft.lane, lanes)}<//>
      <${Field} label="Priority">${select("priority", draft.priority, priorities)}<//>
      <${Field} label="Webhook"><input type="url" placeholder="https://example.com/hook" ...${input("webhook")} /><//>
    </div>
  </details>`;
}

// --- sending ---------------------------------------------------------------------------------------

/** One request at a time: its job as the events tell it, or why there is none. */
function useRun() {
  const [known, setKnown] = useState({});
  const ended = useRef(new AbortController());
  const sent = useRef({}); // what has got no answer, and its key: sent again, it is still one job
  useEffect(() => () => ended.current.abort(), []);
  const start = async (draft, model) => {
    ended.current.abort();
    const { signal } = (ended.current = new AbortController());
    const tell = (fields) => signal.aborted || setKnown((before) => ({ ...before, ...fields }));
    const asked = new Map(draft.questions.map((one) => [nameOf(one), one.instructions.trim()]));
    setKnown({ active: true, asked });
    try {
      const body = write(requestOf(draft, model));
      if (body !== sent.current.body) sent.current = { body, key: `console-${randomText()}` };
      const job = await call("v1/jobs", { method: "POST", body, signal, headers: { "Idempotency-Key": sent.current.key } });
      sent.current = {};
      tell({ job });
      await follow(job.id, { signal, tell, known: job });
    } catch (error) {
      tell({ error, lost: undefined });
    }
    tell({ active: false });
  };
  const cancel = () => {
    const fail = (error) => setKnown((before) => ({ ...before, error }));
    if (known.job) call(`v1/jobs/${known.job.id}/cancel`, { method: "POST" }).catch(fail);
  };
  return { ...known, start, cancel };
}

function randomText() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function Outcome({ run }) {
  const { job, error, lost, active } = run;
  const card = useRef();
  useEffect(() => {
    const below = card.current.getBoundingClientRect().top > innerHeight - 160; // on a phone: under the form
    if ((active || error) && below) card.current.scrollIntoView();
  }, [active, error]);
  return html`<section class="card outcome" aria-labelledby="answers-title" ref=${card}>
    <div class="section-head">
      <h2 id="answers-title">Answers</h2>
      ${job && html`<a href=${`#/jobs/${job.id}`}>Job</a>`}
    </div>
    <p class="unseen" role="status" aria-live="polite">${summary(run)}</p>
    ${error && html`<${Trouble} error=${error} places=${(pointer) => inWords(pointer)} />`}
    ${lost && html`<${Trouble} error=${lost} goesOn />`}
    ${!job && !error && !active &&
    html`<${Empty} title="Nothing asked yet">Each answer comes with the probability of every option.<//>`}
    ${active && html`<${Waiting} job=${job} />`}
    ${job?.done && html`<${Done} job=${job} asked=${run.asked} />`}
  </section>`;
}

function summary({ job, active, error }) {
  if (error) return "";
  if (active) return job?.status === "running" ? "The job runs." : "Asked; waiting.";
  if (!job?.done) return "";
  if (job.status !== "succeeded") return `The job ${job.status}.`;
  const said = Object.entries(job.result.answers).map(([name, answer]) => {
    if (answer.type === "noul") return `${name}: ${answer.noul >= 0.5 ? "yes" : "no"}`;
    return `${name}: ${answer.choice ?? answer.score?.toFixed(2) ?? "no answer"}`;
  });
  return `Answered. ${said.join(". ")}.`;
}

function Waiting({ job }) {
  const { fraction, eta_s: left } = job?.progress ?? {};
  const ahead = job?.queue?.position;
  const note = fraction
    ? `${Math.round(100 * fraction)}%${left ? `, about ${duration(left)} left` : ""}`
    : job?.status === "running" ? "running" : ahead ? `waiting behind ${plural(ahead, "job")}` : "waiting";
  return html`<${Progress} label="Progress of the job" value=${fraction} note=${note} />`;
}

function Done({ job, asked }) {
  if (job.status !== "succeeded") {
    return html`<${Trouble} error=${job.error ?? { message: `The job ${job.status}.` }} />`;
  }
  const took = job.finished_at - job.created_at;
  return html`<${Answers} answers=${job.result.answers} asked=${asked} />
    <${Usage} usage=${job.result.usage} model=${job.result.model}>
      <div><dt>Took</dt><dd>${duration(took)}</dd></div>
    <//>`;
}

/** A pointer of a refusal as people say it: `/questions/team/criteria` is `team › criteria`. */
function inWords(pointer) {
  const parts = pointer.split("/").slice(1).map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
  return (parts[0] === "questions" && parts.length > 1 ? parts.slice(1) : parts).join(" › ");
}

// --- the same as code ------------------------------------------------------------------------------

const FORMS = [["curl", "curl"], ["python", "Python"], ["cli", "CLI"]];
const WRITERS = { curl: asCurl, python: asPython, cli: asCommand };

function Code({ draft, model }) {
  const [form, setForm] = useState("curl");
  let text, unfinished;
  try {
    text = WRITERS[form](draft, requestOf(draft, model));
  } catch (error) {
    unfinished = error.message;
  }
  return html`<section class="card code-card" aria-labelledby="code-title">
    <div class="section-head">
      <h2 id="code-title">As code</h2>
      <${Segmented} label="Form" name="form" options=${FORMS} value=${form} onChange=${setForm} />
    </div>
    ${text
      ? html`<div class="code-box"><${Beginning} text=${text} aria-label="The same request as code" /><${Copy} text=${text} /></div>`
      : html`<p class="hint" dir="auto">${unfinished}.</p>`}
  </section>`;
}
