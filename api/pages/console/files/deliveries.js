// What became of a job's webhook events, try by try, and sending one again.
import { call, isPassing, usePolled } from "./api.js";
import { html, useState } from "./dom.js";
import { duration, moment, plural } from "./format.js";
import { Text, Time, Trouble } from "./ui.js";

const WORDS = { pending: "Pending", delivered: "Delivered", dead: "Given up", disabled: "Endpoint disabled", erased: "Erased" };
const SENDABLE = ["pending", "dead", "disabled"];
const FORBIDDEN = 403; // a key without the scope `webhooks`: its jobs have none

/** The deliveries of a job, once it is `known`; they are read again when its `finished_at` changes. */
export function useDeliveries(jobId, known) {
  const everyMs = (data) => (data?.data.some((one) => one.state === "pending") ? 2_000 : 0);
  const load = (signal) => call(`v1/webhook-deliveries?job_id=${encodeURIComponent(jobId)}`, { signal });
  return usePolled(load, everyMs, known ? `${jobId} ${known.finished_at}` : "");
}

/** Shown only where the job has deliveries: most have no webhook. What passes is said by the page. */
export function Deliveries({ read }) {
  const { data, error, reload } = read;
  const [refused, setRefused] = useState();
  if (error && !isPassing(error) && error.status !== FORBIDDEN) return html`<${Trouble} error=${error} />`;
  if (!data?.data.length) return null;
  const again = async (id) => {
    try {
      setRefused(undefined);
      await call(`v1/webhook-deliveries/${encodeURIComponent(id)}/redeliver`, { method: "POST" });
      reload();
    } catch (problem) {
      setRefused(problem);
    }
  };
  return html`<section class="card" aria-labelledby="deliveries-title">
    <div class="section-head"><h2 id="deliveries-title">Webhook deliveries</h2></div>
    <${Trouble} error=${refused} />
    <ul class="deliveries">
      ${data.data.map((one) => html`<${Delivery} key=${one.id} delivery=${one} again=${() => again(one.id)} />`)}
    </ul>
  </section>`;
}

function Delivery({ delivery, again }) {
  const { state, tries } = delivery;
  const last = tries.at(-1);
  return html`<li class="delivery">
    <div class="delivery-head">
      <span class=${`status status-${state}`}><i aria-hidden="true"></i>${WORDS[state] ?? state}</span>
      <code>${delivery.event}</code>
      <${Text} class="mono delivery-url" value=${delivery.url} />
      ${SENDABLE.includes(state) && html`<button type="button" class="small" onClick=${again}>Redeliver</button>`}
    </div>
    <p class="hint">
      ${plural(tries.length, "try", "tries")}${last && html`, the last <${Time} at=${last.at} />`}
      ${delivery.next_try_at && `, the next ${moment(delivery.next_try_at)}`}
    </p>
    ${tries.length > 0 && html`<details class="more"><summary>Tries</summary>
      <ol class="tries">${tries.map(
        (one) => html`<li key=${one.at}>${moment(one.at)} · ${one.status ?? "no answer"}
          ${one.error && html` · <${Text} value=${one.error} />`} · ${duration(one.duration_ms / 1000)}</li>`,
      )}</ol>
    </details>`}
  </li>`;
}
