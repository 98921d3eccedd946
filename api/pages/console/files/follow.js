// A job followed to its end, over connections that break, servers that restart and answers that ask for patience.
import { callWithHeaders, events, patiently } from "./api.js";

const QUEUED_EVERY_MS = 5_000; // its place in the queue is no event

/**
 * Follow a job until it is done. `known` is what is known of it, if anything is.
 *
 * `tell` gets `job` and `passMs` whenever there is more to tell, and as `lost` why nothing can be known just now.
 *
 * Raises Problem where there is no such job, or none for this key.
 */
export async function follow(id, { signal, tell, known }) {
  const path = `v1/jobs/${encodeURIComponent(id)}?include=result`;
  let job = known;
  const now = (fields) => tell({ ...fields, job: (job = fields.job), lost: undefined });
  const look = async () => {
    const { body, headers } = await callWithHeaders(path, { signal });
    const pass = /\bpass;dur=([\d.]+)/.exec(headers.get("Server-Timing") ?? "");
    return { job: body, passMs: pass && Number(pass[1]) };
  };
  const lost = (error) => tell({ lost: error });
  const read = async () => now(await patiently(look, signal, lost));
  const glance = async () => {
    if (job.status !== "queued" || document.hidden) return;
    const seen = await look().catch(() => undefined); // the events will tell
    if (seen?.job.status === "queued" && job.status === "queued") now(seen);
  };

  if (!job || job.done) await read();
  const glances = setInterval(glance, QUEUED_EVERY_MS);
  try {
    if (job.done) return;
    for await (const { name, data } of events(id, signal, lost)) {
      if (name === "queued") now({ job: data });
      if (name === "started") now({ job: { ...job, ...data, status: "running" } });
      if (name === "progress") now({ job: { ...job, status: "running", progress: { ...job.progress, eta_s: undefined, ...data } } });
      if (name === "done") await read();
    }
  } finally {
    clearInterval(glances);
  }
}
