// What a job was asked, read back as long as the server keeps it.
import { call, parseExactly } from "./api.js";
import { html, useEffect, useState } from "./dom.js";
import { bytes, told } from "./format.js";
import { Text, Trouble } from "./ui.js";

const GONE = 410;

/** The request of a job; `{}` until it is read, and `erased` once the server keeps it no more. */
export function useAsked(id, known) {
  const [read, setRead] = useState({});
  useEffect(() => {
    if (!known) return undefined;
    const ended = new AbortController();
    const tell = (fields) => ended.signal.aborted || setRead(fields);
    call(`v1/jobs/${encodeURIComponent(id)}?include=request`, { signal: ended.signal, parse: parseExactly })
      .then((job) => tell({ asked: job.asked }))
      .catch((error) => tell(error.status === GONE ? { erased: true } : { error }));
    return () => ended.abort();
  }, [id, known]);
  return read;
}

/** The text of each question by its name, for those who read the answers. */
export function instructionsOf(asked) {
  const questions = Object.entries(asked?.questions ?? {});
  return Object.fromEntries(questions.map(([name, question]) => [name, question.instructions && told(question.instructions)]));
}

export function Asked({ read }) {
  const { asked, erased, error } = read;
  if (erased) return html`<p class="hint asked-gone">What it was asked is no longer kept.</p>`;
  if (error) return html`<${Trouble} error=${error} />`;
  if (!asked) return null;
  const text = typeof asked.state === "string" ? asked.state : JSON.stringify(asked.state, null, 2);
  return html`<section class="card" aria-labelledby="asked-title">
    <div class="section-head"><h2 id="asked-title">State</h2></div>
    <${Text} as="pre" class=${`state ${typeof asked.state === "string" ? "" : "mono"}`} tabindex="0" aria-labelledby="asked-title" value=${text} />
    ${asked.media.map(
      (file) => html`<p class="hint" key=${file.sha256}>${file.type}, ${bytes(Number(file.bytes.rawJSON ?? file.bytes))}, <code>sha256 ${file.sha256.slice(0, 16)}…</code></p>`,
    )}
  </section>`;
}
