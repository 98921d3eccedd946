// Small parts that several pages are made of.
import { isPassing } from "./api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./dom.js";
import { ago, moment, plural } from "./format.js";

export const FINAL = ["succeeded", "failed", "canceled", "expired"];

export const WORDS = {
  queued: "Queued",
  running: "Running",
  succeeded: "Succeeded",
  failed: "Failed",
  canceled: "Canceled",
  expired: "Expired",
};

export function Status({ value }) {
  return html`<span class=${`status status-${value}`}><i aria-hidden="true"></i>${WORDS[value] ?? value}</span>`;
}

/** A text that somebody wrote, in whatever script. */
export function Text({ value, as = "span", ...rest }) {
  return html`<${as} dir="auto" ...${rest}>${String(value)}<//>`;
}

export function Time({ at }) {
  if (!at) return "–";
  return html`<time datetime=${new Date(1000 * at).toISOString()} title=${moment(at)}>${ago(at)}</time>`;
}

const MOST_SHOWN = 20_000; // characters: a browser lays out millions at once, and again with each key that is pressed

/** A text that may be of any length: all of it, or its beginning. */
export function Beginning({ text, ...rest }) {
  const more = text.length - MOST_SHOWN;
  return html`<pre tabindex="0" ...${rest}>${more > 0 ? `${text.slice(0, MOST_SHOWN)}…` : text}</pre>
    ${more > 0 && html`<p class="hint">… and ${plural(more, "more character")}.</p>`}`;
}

/** A choice among a few: radio buttons, so that arrow keys work, drawn as one bar. */
export function Segmented({ label, name, options, value, onChange }) {
  return html`<fieldset class="segmented">
    <legend class="unseen">${label}</legend>
    ${options.map(
      ([option, text]) => html`<label key=${option}>
        <input type="radio" name=${name} value=${option} checked=${option === value} onChange=${() => onChange(option)} />
        <span>${text}</span>
      </label>`,
    )}
  </fieldset>`;
}

export function Field({ label, children }) {
  return html`<label class="field"><span class="label">${label}</span>${children}</label>`;
}

/** A text area that is as high as its text. */
export function Area({ value, onInput, rows = 2, maxHeight = 420, ...rest }) {
  const area = useRef();
  useEffect(() => {
    const element = area.current;
    element.style.height = "auto";
    element.style.height = `${Math.min(maxHeight, element.scrollHeight + 2)}px`;
  }, [value, maxHeight]);
  return html`<textarea ref=${area} rows=${rows} value=${value} dir="auto"
    onInput=${(event) => onInput(event.currentTarget.value)} ...${rest}></textarea>`;
}

export function Copy({ text, label = "Copy" }) {
  const [told, setTold] = useState("");
  const copy = async () => {
    setTold((await writeToClipboard(text)) ? "Copied" : "Not allowed");
    setTimeout(() => setTold(""), 1_600);
  };
  return html`<button type="button" class="quiet small" onClick=${copy} aria-live="polite">${told || label}</button>`;
}

async function writeToClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea"); // over plain http from another host there is no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** What went wrong, said at once to those who listen. `places` words the pointers of a refusal; `goesOn`: it is retried. */
export function Trouble({ error, places = (pointer) => pointer, goesOn = false }) {
  if (!error) return null;
  const listed = error.errors?.length > 1 ? error.errors : [];
  return html`<div class="trouble" role="alert">
    <strong dir="auto">${sentence(error.message)}${when(error, goesOn)}</strong>
    ${listed.length > 0 &&
    html`<ul>
      ${listed.map(
        (one) => html`<li dir="auto"><code>${places(one.pointer)}</code> ${one.detail}</li>`,
      )}
    </ul>`}
    ${error.code && html`<span class="hint">${error.code}${error.requestId && ` · ${error.requestId}`}</span>`}
  </div>`;
}

function when(error, goesOn) {
  if (goesOn && isPassing(error)) return " This page tries again by itself.";
  return error.retryAfterS ? ` Try again in ${plural(Math.ceil(error.retryAfterS), "second")}.` : "";
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><h3>${title}</h3><p>${children}</p></div>`;
}

/** Ask before something that cannot be undone; `Escape` and the first button keep things as they are. */
export function Confirm({ title, children, action, onConfirm, onClose }) {
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <p>${children}</p>
    <div class="actions end">
      <button type="button" onClick=${onClose}>Keep it</button>
      <button type="button" class="danger" onClick=${onConfirm}>${action}</button>
    </div>
  <//>`;
}

export function Dialog({ title, onClose, children }) {
  const dialog = useRef();
  useLayoutEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    // The browser gives the focus back for a dialog that closes, not for one that goes away, which it does after this.
    return () => queueMicrotask(() => before?.focus());
  }, []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="dialog-title">
    <h2 id="dialog-title">${title}</h2>
    ${children}
  </dialog>`;
}

export function Progress({ label, value, note }) {
  return html`<div class="progress">
    <progress max="1" value=${value || undefined} aria-label=${label}></progress>
    <span class="hint">${note}</span>
  </div>`;
}
