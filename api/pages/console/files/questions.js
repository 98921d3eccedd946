// The builder of questions: of each its kind, its name, its text and its options.
import { html, useRef } from "./dom.js";
import { question as fresh, row } from "./draft.js";
import { Area, Field, Segmented } from "./ui.js";

const KINDS = [["noul", "Yes / no"], ["choice", "Choice"], ["score", "Score"]];

export function Questions({ questions, onChange }) {
  const list = useRef();
  const change = (id, fields) => onChange(questions.map((one) => (one.id === id ? { ...one, ...fields } : one)));
  const add = (kind) => {
    const added = fresh(kind);
    onChange([...questions, added]);
    focusLater(() => list.current.querySelector(`#question-${added.id} textarea`));
  };
  const remove = (id) => {
    onChange(questions.filter((one) => one.id !== id));
    focusLater(() => list.current.querySelector(".adders button"));
  };
  return html`<section ref=${list} aria-labelledby="questions-title">
    <div class="section-head"><h2 id="questions-title">Questions</h2></div>
    ${questions.map(
      (one, index) => html`<${Question} key=${one.id} question=${one} index=${index}
        onChange=${(fields) => change(one.id, fields)} onRemove=${() => remove(one.id)} />`,
    )}
    <div class="adders">
      ${KINDS.map(
        ([kind, text]) => html`<button type="button" class="quiet" key=${kind} onClick=${() => add(kind)}>
          <span aria-hidden="true">+ </span>${text}<span class="unseen"> question: add one</span>
        </button>`,
      )}
    </div>
  </section>`;
}

function Question({ question, index, onChange, onRemove }) {
  const number = index + 1;
  return html`<fieldset class="card question" id=${`question-${question.id}`} aria-label=${`Question ${number}`}>
    <div class="question-head">
      <${Segmented} label=${`Kind of question ${number}`} name=${`kind-${question.id}`} options=${KINDS}
        value=${question.kind} onChange=${(kind) => onChange({ kind })} />
      <button type="button" class="quiet small" onClick=${onRemove} aria-label=${`Remove question ${number}`}>Remove</button>
    </div>
    <div class="worded">
      <${Field} label=${`Question ${number}`}>
        <${Area} value=${question.instructions} onInput=${(instructions) => onChange({ instructions })} rows=${1}
          placeholder=${PLACEHOLDERS[question.kind]} />
      <//>
      <${Field} label="Name in the answer">
        <input value=${question.name} dir="auto" maxlength="256" placeholder="the question itself"
          onInput=${(event) => onChange({ name: event.currentTarget.value })} />
      <//>
    </div>
    ${question.kind === "noul"
      ? html`<${Meanings} question=${question} onChange=${onChange} />`
      : html`<${Options} question=${question} onChange=${(options) => onChange({ options })} />`}
  </fieldset>`;
}

const PLACEHOLDERS = {
  noul: "Does the customer ask for a refund?",
  choice: "Which team should take it?",
  score: "How urgent is it?",
};

function Meanings({ question, onChange }) {
  return html`<details class="more" open=${Boolean(question.yes || question.no)}>
    <summary>Say what yes and no mean</summary>
    <div class="pair">
      ${["yes", "no"].map(
        (side) => html`<${Field} key=${side} label=${side === "yes" ? "Yes means" : "No means"}>
          <input value=${question[side]} dir="auto" onInput=${(event) => onChange({ [side]: event.currentTarget.value })} />
        <//>`,
      )}
    </div>
  </details>`;
}

/** The options of a choice, or the levels of a score, lowest first. Enter goes on to the next, as in a list. */
function Options({ question, onChange }) {
  const list = useRef();
  const { options, kind } = question;
  const what = kind === "choice" ? "Option" : "Level";
  const focusOn = (place) => focusLater(() => list.current.querySelectorAll("input.option-name")[place]);
  const change = (id, fields) => onChange(options.map((one) => (one.id === id ? { ...one, ...fields } : one)));
  const insert = (place) => {
    onChange([...options.slice(0, place), row(), ...options.slice(place)]);
    focusOn(place);
  };
  const remove = (place) => {
    onChange(options.filter((_, other) => other !== place));
    focusOn(Math.max(0, place - 1));
  };
  const press = (event, place) => {
    if (event.isComposing || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter") {
      event.preventDefault();
      insert(place + 1);
    } else if (event.key === "Backspace" && !event.currentTarget.value && options.length > 2) {
      event.preventDefault();
      remove(place);
    }
  };
  return html`<div class="options" ref=${list}>
    <span class="label">${kind === "choice" ? "Options" : "Levels, lowest first"}</span>
    ${options.map(
      (option, place) => html`<div class="option" key=${option.id}>
        <span class="option-mark" aria-hidden="true">${kind === "choice" ? "" : place}</span>
        <input class="option-name" value=${option.name} dir="auto" placeholder=${`${what} ${place + 1}`}
          aria-label=${`${what} ${place + 1}`} onKeyDown=${(event) => press(event, place)}
          onInput=${(event) => change(option.id, { name: event.currentTarget.value })} />
        ${kind === "choice" &&
        html`<input value=${option.description} dir="auto" placeholder="what it covers (optional)"
          aria-label=${`What option ${place + 1} covers`}
          onInput=${(event) => change(option.id, { description: event.currentTarget.value })} />`}
        <button type="button" class="quiet icon" disabled=${options.length <= 2} onClick=${() => remove(place)}
          aria-label=${`Remove ${what.toLowerCase()} ${place + 1}`}><span aria-hidden="true">×</span></button>
      </div>`,
    )}
    <button type="button" class="quiet small" onClick=${() => insert(options.length)}>
      <span aria-hidden="true">+ </span>${what}<span class="unseen">: add one</span>
    </button>
  </div>`;
}

/** Focus what is there once Preact has rendered, which it does in a microtask: before the next key is pressed. */
function focusLater(find) {
  queueMicrotask(() => find()?.focus());
}
