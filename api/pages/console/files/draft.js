// What is being worded on the page *Ask*: kept in the tab while other pages are looked at, pictures in memory alone.

const PLACE = "d3serve.draft";
let number = Date.now(); // only to tell rows apart while they are moved about
let files = [];

export const row = (fields = {}) => ({ id: ++number, name: "", description: "", ...fields });

export function question(kind, fields = {}) {
  return { id: ++number, kind, name: "", instructions: "", yes: "", no: "", options: [row(), row()], ...fields };
}

const EMPTY = () => ({
  stateKind: "text", state: "", questions: [question("noul")], files: [], model: "", lane: "", priority: "normal", webhook: "",
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

export function loadDraft() {
  try {
    return { ...EMPTY(), ...JSON.parse(sessionStorage.getItem(PLACE)), files };
  } catch {
    return EMPTY();
  }
}

export function keepDraft(draft) {
  files = draft.files;
  try {
    sessionStorage.setItem(PLACE, JSON.stringify({ ...draft, files: [] }));
  } catch {
    // a draft of several megabytes does not fit there: it is then kept only as long as the page is
  }
}
