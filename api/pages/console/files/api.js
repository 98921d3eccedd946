// The HTTP API as the console calls it: relative to where the page lies, so that it works behind any proxy.
import { useCallback, useEffect, useRef, useState } from "./dom.js";

const BASE = new URL(".", document.baseURI);
const KEY = "d3serve.key";
const watchers = new Set();

/** The key of this tab: kept in its sessionStorage, and gone when the tab is closed. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
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

async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  if (method !== "GET") sent["Content-Type"] = "application/json"; // a request with an Origin has to name one
  let response;
  try {
    response = await fetch(new URL(path, BASE), { method, body, headers: sent, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "The server does not answer.", code: "unreachable" });
  }
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
  const text = await response.text();
  return { body: text ? parse(text) : null, headers: response.headers };
}

/** JSON whose numbers keep their digits when they are written again, in browsers that can do so. */
export function parseExactly(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && JSON.rawJSON && context ? JSON.rawJSON(context.source) : value,
  );
}

/**
 * The events of a job until it is done, over connections that are taken up where they broke.
 *
 * Read with fetch, since an EventSource cannot send the key.
 */
export async function* events(jobId, signal) {
  for (let last = "", pause = 500; ; pause = Math.min(2 * pause, 8_000)) {
    try {
      const headers = last ? { "Last-Event-ID": last } : {};
      const response = await send(`v1/jobs/${encodeURIComponent(jobId)}/events`, { headers, signal });
      for await (const event of parsed(response.body)) {
        last = event.id || last;
        pause = 500;
        yield event;
        if (event.name === "done") return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status >= 400 && error.status < 500 && error.status !== 429) throw error;
    }
    await new Promise((go) => setTimeout(go, pause));
    if (signal.aborted) return;
  }
}

async function* parsed(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      if (fields.data) yield { id: fields.id, name: fields.event, data: JSON.parse(fields.data) };
    }
  }
}

/**
 * What `load` gives, asked for again every `everyMs` while the page is looked at; 0 asks once.
 *
 * `wanted` names what is asked for: when it changes, what was known before is forgotten.
 */
export function usePolled(load, everyMs, wanted) {
  const [known, setKnown] = useState({ wanted });
  const [again, setAgain] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  const period = typeof everyMs === "function" ? everyMs(known.wanted === wanted ? known.data : undefined) : everyMs;
  useEffect(() => {
    const ended = new AbortController();
    let timer;
    let first = true;
    const ask = async () => {
      let pause = period;
      if (first || !document.hidden) {
        first = false;
        try {
          const data = await latest.current(ended.signal);
          if (!ended.signal.aborted) setKnown({ wanted, data });
        } catch (error) {
          if (ended.signal.aborted) return;
          setKnown((before) => ({ wanted, data: before.wanted === wanted ? before.data : undefined, error }));
          pause &&= Math.max(pause, 1000 * (error.retryAfterS || 3));
        }
      }
      if (pause && !ended.signal.aborted) timer = setTimeout(ask, pause);
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
