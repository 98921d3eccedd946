// What a job was asked, read back as long as the server keeps it.
import { call, isPassing, usePolled } from "./api.js";
import { html, useMemo } from "./dom.js";
import { bytes } from "./format.js";
import { parse, told, write } from "./json.js";
import { Beginning, Trouble } from "./ui.js";

const GONE = 410;

/** The request of a job, as `Pairs`: `{}` until it is read, and `erased` once the server keeps it no more. */
export function useAsked(id, known) {
  const path = `v1/jobs/${encodeURIComponent(id)}?include=request`;
  const load = async (signal) => (await call(path, { signal, parse })).get("asked");
  const { data: asked, error } = usePolled(load, 0, known ? id : "");
  return error?.status === GONE ? { erased: true } : { asked, error };
}

/** The text of each question by its name, for those who read the answers. */
export function instructionsOf(asked) {
  const texts = asked?.get("questions").pairs.map(([name, question]) => [name, question.get("instructions")]) ?? [];
  return new Map(texts.map(([name, text]) => [name, text && told(text)]));
}

/** The state; what passes is said by the page. */
export function Asked({ read }) {
  const { asked, erased, error } = read;
  if (erased) return html`<p class="hint asked-gone">What it was asked is no longer kept.</p>`;
  if (error && !isPassing(error)) return html`<${Trouble} error=${error} />`;
  return asked ? html`<${State} asked=${asked} />` : null;
}

function State({ asked }) {
  const state = asked.get("state");
  const isText = typeof state === "string";
  const text = useMemo(() => (isText ? state : write(state, "")), [state]);
  return html`<section class="card" aria-labelledby="asked-title">
    <div class="section-head"><h2 id="asked-title">State</h2></div>
    <${Beginning} text=${text} dir="auto" class=${`state ${isText ? "" : "mono"}`} aria-labelledby="asked-title" />
    ${asked.get("media").map((file) => {
      const sum = file.get("sha256");
      const size = bytes(Number(file.get("bytes").text));
      return html`<p class="hint" key=${sum}>${file.get("type")}, ${size}, <code>sha256 ${sum.slice(0, 16)}…</code></p>`;
    })}
  </section>`;
}
