// Answers as bars: what was decided, how probable each option is, how concentrated the probabilities are.
import { html, useState } from "./dom.js";
import { count, percent } from "./format.js";
import { Text, Trouble } from "./ui.js";

const SHOWN = 8; // of a choice with more options, the most probable

/** `asked` has the text of each question by its name, as far as it is known. */
export function Answers({ answers, asked = new Map() }) {
  return html`<div class="answers">
    ${Object.entries(answers).map(
      ([name, answer]) => html`<${Answer} key=${name} name=${name} answer=${answer} asked=${asked.get(name)} />`,
    )}
  </div>`;
}

function Answer({ name, answer, asked }) {
  if (answer.type === "error") {
    return html`<article class="answer"><${Text} as="h3" value=${name} /><${Trouble} error=${answer.error} /></article>`;
  }
  const { decided, bars, inOrder } = read(answer);
  return html`<article class="answer">
    <header>
      <div>
        <${Text} as="h3" value=${name} />
        ${asked && asked !== name && html`<${Text} as="p" class="hint" value=${asked} />`}
      </div>
      <${Text} as="strong" class="decided" value=${decided} />
    </header>
    <${Bars} bars=${bars} inOrder=${inOrder} />
    ${answer.confidence !== undefined &&
    html`<p class="hint confidence" title="1 when one option has all the probability, 0 when all are equal">
      confidence ${answer.confidence.toFixed(3)}
    </p>`}
  </article>`;
}

/** What an answer of each kind shows; one of a kind that this page does not know shows its JSON. */
function read(answer) {
  switch (answer.type) {
    case "choice":
      return {
        decided: answer.choice,
        bars: Object.entries(answer.probabilities).map(([name, share]) => ({ name, share, best: name === answer.choice })),
      };
    case "noul": {
      const yes = answer.noul >= 0.5;
      return {
        decided: yes ? "yes" : "no",
        inOrder: true,
        bars: [
          { name: "yes", share: answer.noul, best: yes },
          { name: "no", share: 1 - answer.noul, best: !yes },
        ],
      };
    }
    case "score": {
      const best = Math.max(...Object.values(answer.probabilities));
      return {
        decided: `${answer.score.toFixed(2)} of ${Object.keys(answer.legend).length - 1}`,
        inOrder: true,
        bars: Object.entries(answer.probabilities).map(([level, share]) => ({
          name: `${level} · ${answer.legend[level]}`,
          share,
          best: share === best,
        })),
      };
    }
    default:
      return { decided: JSON.stringify(answer), bars: [] };
  }
}

function Bars({ bars, inOrder }) {
  const [all, setAll] = useState(false);
  const ordered = inOrder ? bars : [...bars].sort((a, b) => b.share - a.share);
  const shown = all || bars.length <= SHOWN + 1 ? ordered : ordered.slice(0, SHOWN);
  return html`<ul class="bars">
      ${shown.map(
        (bar) => html`<li key=${bar.name} class=${bar.best ? "best" : ""}>
          <${Text} class="bar-name" value=${bar.name} title=${bar.name} />
          <span class="bar-share">${percent(bar.share)}</span>
          <span class="bar" aria-hidden="true"><i style=${{ inlineSize: `${100 * bar.share}%` }}></i></span>
        </li>`,
      )}
    </ul>
    ${shown.length < bars.length &&
    html`<button type="button" class="quiet small" onClick=${() => setAll(true)}>
      Show all ${count(bars.length)} options
    </button>`}`;
}

export function Usage({ usage, model, children }) {
  const facts = [
    ["Input tokens", count(usage.input_tokens)],
    ["Computed tokens", count(usage.computed_tokens)],
    ["State", `${count(usage.state_tokens)} tokens, ${usage.state_cached ? "from the cache" : "read once"}`],
    ...(usage.media_tokens ? [["Media tokens", count(usage.media_tokens)]] : []),
    ["Model", model],
  ];
  return html`<${Facts} facts=${facts}>${children}<//>`;
}

export function Facts({ facts, children }) {
  return html`<dl class="facts">
    ${facts.map(
      ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd dir="auto">${value}</dd></div>`,
    )}
    ${children}
  </dl>`;
}
