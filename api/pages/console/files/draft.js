// What is being worded on the page *Ask*: kept in the tab while other pages are looked at, pictures in memory alone.
import { useLayoutEffect, useState } from "./dom.js";
import { told, write } from "./json.js";
import kept from "./kept.js";

const PLACE = "d3serve.draft";
let number = Date.now(); // only to tell rows apart while they are moved about

export const row = (fields = {}) => ({ id: ++number, name: "", description: "", ...fields });

export function question(kind, fields = {}) {
  return { id: ++number, kind, name: "", instructions: "", yes: "", no: "", options: [row(), row()], ...fields };
}

const EMPTY = () => ({
  stateKind: "text", state: "", questions: [question("noul")], files: [], lacks: 0, model: "", lane: "", priority: "normal", webhook: "",
});

export const EXAMPLE = () => ({
  ...EMPTY(),
  state:
    "Customer: I was charged twice for my order last week, and the second parcel never arrived. " +
    "I need this sorted out today, please.",
  questions: [
    question("noul", { name: "refund", instructions: "Does the customer ask for money back?" }),
    question("choice", {
      name: "team",
      instructions: "Which team should take it?",
      options: [row({ name: "billing", description: "charges, refunds" }), row({ name: "shipping" }), row({ name: "accounts" })],
    }),
    question("score", {
      name: "urgency",
      instructions: "How urgent is it?",
      options: [row({ name: "can wait" }), row({ name: "this week" }), row({ name: "today" })],
    }),
  ],
});

let current; // also of a draft that is too large for the tab's storage
let former; // what another draft took the place of
const watchers = new Set();

/** The draft as it is now, in whatever shows it. */
export function useDraft() {
  const [draft, show] = useState(loadDraft);
  useLayoutEffect(() => {
    watchers.add(show);
    return () => watchers.delete(show);
  }, []);
  return draft;
}

/** Give it the fields that `fieldsOf` tells from the draft as it is: by then it may be another than was shown. */
export function changeDraft(fieldsOf) {
  const draft = loadDraft();
  keepDraft({ ...draft, ...fieldsOf(draft) });
}

function loadDraft() {
  return (current ??= stored());
}

function stored() {
  try {
    return { ...EMPTY(), ...JSON.parse(kept.getItem(PLACE)) };
  } catch {
    return EMPTY();
  }
}

/**
 * Keep it as long as the page is there; and in the tab, without pictures, if it is not too large for that.
 *
 * At once: an effect runs only after the next frame, and not at all if the page *Ask* is left before.
 */
function keepDraft(draft) {
  current = draft;
  for (const show of watchers) show(draft);
  try {
    kept.setItem(PLACE, JSON.stringify({ ...draft, files: [] }));
  } catch {
    kept.removeItem(PLACE); // rather none than an older one
  }
}

/** Put a draft in the place of the one that is there, which can be brought back. */
export function replaceDraft(draft) {
  const before = loadDraft();
  if (before.state || before.files.length || before.questions.some((one) => one.instructions)) former = before;
  keepDraft(draft);
}

export const replaced = () => former;

/** Put the draft back that another took the place of. */
export function bringBack() {
  const draft = former;
  former = undefined;
  keepDraft(draft);
}

// --- from a job ------------------------------------------------------------------------------------

/** The draft that asks what a job did; `asked` as the API keeps it, `request` as the job tells of it. */
export function draftOf(asked, request) {
  const state = asked.get("state");
  return {
    ...EMPTY(),
    stateKind: typeof state === "string" ? "text" : "json",
    state: typeof state === "string" ? state : write(state, ""),
    questions: asked.get("questions").pairs.map(([name, one]) => questionOf(name, one)),
    model: request.model,
    lane: request.lane,
    priority: request.priority,
    lacks: asked.get("media").length,
  };
}

function questionOf(name, asked) {
  const instructions = told(asked.get("instructions") ?? "");
  const fields = { name: name === instructions ? "" : name, instructions };
  const criteria = asked.get("criteria");
  switch (asked.get("type")) {
    case "choice":
      return question("choice", { ...fields, options: criteria.pairs.map(([name, covers]) => row({ name, description: told(covers ?? "") })) });
    case "score":
      return question("score", { ...fields, options: criteria.map((level) => row({ name: told(level) })) });
    default:
      return question("noul", { ...fields, yes: told(criteria?.get("true") ?? ""), no: told(criteria?.get("false") ?? "") });
  }
}
