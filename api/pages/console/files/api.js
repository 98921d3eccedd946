// The HTTP API as the console calls it: relative to where the page lies, so that it works behind any proxy.
import { useCallback, useEffect, useRef, useState } from "./dom.js";
import kept from "./kept.js";

const BASE = new URL(".", document.baseURI);
const KEY = "d3serve.key";
const watchers = new Set();

/** The key of this tab, and gone when the tab is closed. */
export const key = {
  get: () => kept.getItem(KEY) ?? "",
  set(value) {
    if (value) kept.setItem(KEY, value);
    else kept.removeItem(KEY);
    for (const told of watchers) told();
  },
  watch(told) {
    watchers.add(told);
    return () => watchers.delete(told);
  },
};

export const address = BASE.href.replace(/\/$/, "");

/** What the API refused, or that it did not answer (status 0). */
export class Problem extends Error {
  constructor(status, body = {}, retryAfterS = 0) {
    super(body.detail || body.title || `the server answered ${status}`);
    this.status = status;
    this.code = body.code || "";
    this.errors = body.errors || [];
    this.requestId = body.request_id || "";
    this.retryAfterS = retryAfterS;
  }
}

/** Whether it may be otherwise in a moment: nobody answers, or whoever does asks for patience or is at fault. */
export function isPassing(error) {
  return error instanceof Problem && (error.status === 0 || error.status === 429 || error.status >= 500);
}

const unreachable = () => new Problem(0, { detail: "The server does not answer.", code: "unreachable" });

const MOST_POLLS = 3; // by one page at a time
const POLLED_SHARE = 0.5; // of the requests a minute that a key may send; the rest is for who works with it
let leastPauseMs = 0;

async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (/[^\x21-\x7e]/.test(key.get())) throw new Problem(401, { detail: "This is no API key." }); // nor can it be sent
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  if (method !== "GET") sent["Content-Type"] = "application/json"; // a request with an Origin has to name one
  let response;
  try {
    response = await fetch(new URL(path, BASE), { method, body, headers: sent, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  const perMinute = /\bq=(\d+)/.exec(response.headers.get("RateLimit-Policy") ?? "");
  leastPauseMs = perMinute ? (MOST_POLLS * 60_000) / (POLLED_SHARE * Number(perMinute[1])) : 0;
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Problem(response.status, problem, Number(response.headers.get("Retry-After")) || 0);
}

/** The JSON of an answer; null where there is none. */
export async function call(path, options) {
  return (await callWithHeaders(path, options)).body;
}

/** The JSON of an answer, read with `parse`, and its headers. */
export async function callWithHeaders(path, { parse = JSON.parse, ...options } = {}) {
  const response = await send(path, options);
  const text = await response.text().catch((error) => {
    throw error.name === "AbortError" ? error : unreachable(); // cut off in its middle
  });
  try {
    return { body: text ? parse(text) : null, headers: response.headers };
  } catch {
    throw new Problem(0, { detail: "What answers here is not this API.", code: "unreadable" }); // a proxy's page
  }
}

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8_000;
const RETRY_S = 3;

/** Time before another try: longer each time, and as long as the server asked for. Ends with `signal`. */
function pauseBefore(pause, error, signal) {
  return new Promise((go) => {
    const timer = setTimeout(over, Math.max(pause, 1000 * (error?.retryAfterS ?? 0)));
    function over() {
      clearTimeout(timer);
      signal.removeEventListener("abort", over);
      go();
    }
    signal.addEventListener("abort", over);
  });
}

/** What `load` gives, tried until it is neither the server nor the connection that fails; `tell` hears why it is not. */
export async function patiently(load, signal, tell) {
  for (let pause = FIRST_PAUSE_MS; ; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
    try {
      return await load();
    } catch (error) {
      if (signal.aborted || !isPassing(error)) throw error;
      tell(error);
      await pauseBefore(pause, error, signal);
    }
  }
}

/**
 * The events of a job until it is done, over connections that are taken up where they broke.
 *
 * Read with fetch, since an EventSource cannot send the key. `tell` hears why there is no connection, and of nothing
 * wrong as soon as there is one.
 */
export async function* events(jobId, signal, tell) {
  for (let last = "", pause = FIRST_PAUSE_MS; ; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
    let lost;
    try {
      const headers = last ? { "Last-Event-ID": last } : {};
      const response = await send(`v1/jobs/${encodeURIComponent(jobId)}/events`, { headers, signal });
      tell(undefined);
      for await (const event of parsed(response.body)) {
        last = event.id || last;
        pause = FIRST_PAUSE_MS;
        yield event;
        if (event.name === "done") return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && !isPassing(error)) throw error;
      lost = error instanceof Problem ? error : unreachable();
    }
    if (lost) tell(lost);
    await pauseBefore(pause, lost, signal);
    if (signal.aborted) return;
  }
}

async function* parsed(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
        if (fields.data) yield { id: fields.id, name: fields.event, data: JSON.parse(fields.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // of no use any more: a connection counts, here and there
  }
}

/**
 * What `load` gives, asked for again every `everyMs` while the page is looked at; 0 asks until it is answered.
 *
 * `wanted` names what is asked for: when it changes, what was known before is forgotten. Without it nothing is asked.
 */
export function usePolled(load, everyMs, wanted) {
  const [known, setKnown] = useState({ wanted });
  const [again, setAgain] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  const period = typeof everyMs === "function" ? everyMs(known.wanted === wanted ? known.data : undefined) : everyMs;
  useEffect(() => {
    if (!wanted) return undefined;
    const ended = new AbortController();
    let timer;
    let first = true;
    const ask = async () => {
      let pause = period;
      if (!first && document.hidden) pause ||= LONGEST_PAUSE_MS;
      else {
        first = false;
        try {
          const data = await latest.current(ended.signal);
          if (!ended.signal.aborted) setKnown({ wanted, data });
        } catch (error) {
          if (ended.signal.aborted) return;
          setKnown((before) => ({ wanted, data: before.wanted === wanted ? before.data : undefined, error }));
          if (isPassing(error)) pause = 1000 * (error.retryAfterS || RETRY_S);
        }
      }
      if (pause && !ended.signal.aborted) timer = setTimeout(ask, Math.max(pause, leastPauseMs));
    };
    ask();
    const unwatch = key.watch(() => setAgain((times) => times + 1));
    return () => {
      ended.abort();
      clearTimeout(timer);
      unwatch();
    };
  }, [wanted, period, again]);
  const reload = useCallback(() => setAgain((times) => times + 1), []);
  return { ...(known.wanted === wanted ? known : {}), reload };
}
