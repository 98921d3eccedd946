// A request as text: the body that is sent, and the same as curl, Python and the command line would send it.
import { address, key } from "./api.js";
import { Pairs, Raw, parse, write } from "./json.js";

/** Why a draft cannot be sent; `pointer` says where, as the API's refusals do. */
export class Unfinished extends Error {
  constructor(message, pointer) {
    super(message);
    this.pointer = pointer;
  }
}

/** The name of a question: the one given, or its text, as `d3serve ask` does it. */
export function nameOf(question) {
  const text = question.instructions.trim();
  return question.name.trim() || (text.length > 200 ? `${text.slice(0, 199)}…` : text);
}

/** The request of a draft. Raises Unfinished. */
export function requestOf(draft, model) {
  return new Pairs([
    ["model", model],
    ["state", stateOf(draft)],
    ["questions", new Pairs(namedQuestions(draft.questions))],
    ...["image", "video"].map((kind) => [`${kind}s`, filesOf(draft, kind, (file) => file.url)]),
    ["job", jobOf(draft)],
  ]);
}

function stateOf(draft) {
  if (draft.stateKind === "text") return draft.state;
  let value;
  try {
    value = JSON.parse(draft.state);
  } catch (error) {
    throw new Unfinished(`The state is no JSON: ${error.message}`, "/state");
  }
  if (value === null || typeof value !== "object") {
    throw new Unfinished("A state in JSON is an object or a list", "/state");
  }
  return new Raw(draft.state.trim());
}

function namedQuestions(questions) {
  const named = questions.map((question, index) => [nameOf(question), wire(question, index)]);
  for (const [index, [name]] of named.entries()) {
    if (!name) throw new Unfinished(`Question ${index + 1} asks nothing yet`, `/questions/${index}`);
    if (named.findIndex(([other]) => other === name) < index) {
      throw new Unfinished(`Two questions have the name “${name}”; give one another name`, `/questions/${index}`);
    }
  }
  if (!named.length) throw new Unfinished("Ask at least one question", "/questions");
  return named;
}

function wire(question, index) {
  const instructions = question.instructions.trim() || undefined;
  return new Pairs([["type", question.kind], ["instructions", instructions], ["criteria", criteria(question, index)]]);
}

function criteria(question, index) {
  switch (question.kind) {
    case "choice":
      return new Pairs(
        options(question, index, 2).map((option) => [option.name.trim(), option.description.trim() || null]),
      );
    case "score":
      return options(question, index, 2).map((option) => option.name.trim());
    default: {
      const [yes, no] = [question.yes.trim(), question.no.trim()];
      return yes || no ? new Pairs([["true", yes || undefined], ["false", no || undefined]]) : undefined;
    }
  }
}

function options(question, index, least) {
  const what = question.kind === "choice" ? "options" : "levels";
  const given = question.options.filter((option) => option.name.trim());
  const names = given.map((option) => option.name.trim());
  const twice = names.find((name, place) => names.indexOf(name) < place);
  if (twice) throw new Unfinished(`“${twice}” stands twice among the ${what} of question ${index + 1}`, `/questions/${index}`);
  if (given.length < least) throw new Unfinished(`Question ${index + 1} needs at least ${least} ${what}`, `/questions/${index}`);
  return given;
}

function filesOf(draft, kind, told) {
  const files = draft.files.filter((file) => file.kind === kind);
  return files.length ? files.map(told) : undefined;
}

function jobOf(draft) {
  const job = new Pairs([
    ["lane", draft.lane || undefined],
    ["priority", draft.priority === "normal" ? undefined : draft.priority],
    ["webhook", draft.webhook.trim() ? { url: draft.webhook.trim() } : undefined],
  ]);
  return job.pairs.length ? job : undefined;
}

// --- as text ---------------------------------------------------------------------------------------

// A number of JSON is one of Python.
const PYTHON_WORDS = {
  null: "None",
  true: "True",
  false: "False",
  raw: (text, indent) => (/^[[{]/.test(text) ? write(parse(text), indent, PYTHON_WORDS) : text),
};

/** A text as one word of a shell. */
function quoted(text) {
  return /^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** The files of a draft by their names, as commands that run beside them name them. */
function withNames(draft, request) {
  const names = ["image", "video"].map((kind) => [`${kind}s`, filesOf(draft, kind, (file) => file.name)]);
  const kept = request.pairs.filter(([name]) => name !== "images" && name !== "videos");
  return new Pairs([...kept, ...names]);
}

export function asCurl(draft, request) {
  const head = [
    `curl -s ${quoted(`${address}/v1/jobs`)}`,
    "-H 'content-type: application/json'",
    "-H 'prefer: wait=30'",
    ...(key.get() ? ['-H "authorization: Bearer $D3SERVE_API_KEY"'] : []),
  ];
  if (!draft.files.length) return [...head, `-d ${quotedAlways(write(request, ""))}`].join(" \\\n  ");
  // A file is too long for an argument: its base64 goes through a pipe, between the parts of the body.
  const mark = `file-${Math.random().toString(36).slice(2)}-`;
  const marked = { ...draft, files: draft.files.map((file, number) => ({ ...file, url: mark + number })) };
  const body = write(requestOf(marked, request.pairs[0][1]));
  const parts = body.split(new RegExp(`${mark}(\\d+)`)).flatMap((text, place) => {
    if (place % 2 === 0) return `printf %s ${quotedAlways(text)}`;
    const file = draft.files[text];
    return [`printf %s ${quotedAlways(file.url.slice(0, file.url.indexOf(",") + 1))}`, `base64 -w0 ${quoted(file.name)}`];
  });
  return `{ ${parts.join("\n  ")}\n} | ${[...head, "--data-binary @-"].join(" \\\n  ")}`;
}

function quotedAlways(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function asPython(draft, request) {
  const given = Object.fromEntries(withNames(draft, request).pairs);
  const python = (value) => write(value, "        ", PYTHON_WORDS);
  const options = ["model", "images", "videos", "job"].filter((name) => given[name] !== undefined);
  const keyed = key.get() ? ', api_key=os.environ["D3SERVE_API_KEY"]' : "";
  return [
    ...(keyed ? ["import os", ""] : []),
    "from d3serve.client import Client",
    "",
    `with Client(${JSON.stringify(address)}${keyed}) as client:`,
    "    response = client.ask(",
    `        ${python(given.state)},`,
    `        ${python(given.questions)},`,
    ...options.map((name) => `        ${name}=${python(given[name])},`),
    "    )",
    '    print(response["answers"])',
  ].join("\n");
}

export function asCommand(draft, request) {
  const url = ["--url", quoted(address)];
  const named = withNames(draft, request);
  if (draft.stateKind === "text" && !jobOf(draft)) {
    const asked = flags(draft) ?? [["--questions", quotedAlways(write(Object.fromEntries(named.pairs).questions, ""))]];
    const files = draft.files.map((file) => [`--${file.kind}`, quoted(file.name)]);
    const lines = [["d3serve ask", ...url], ["--state", quotedAlways(draft.state)], ...asked, ...files];
    return lines.map((line) => line.join(" ")).join(" \\\n  ");
  }
  const body = write(named, "");
  let end = "REQUEST";
  while (body.split("\n").includes(end)) end += "_";
  return `cat > request.json <<'${end}'\n${body}\n${end}\nd3serve ask request.json ${url.join(" ")}`;
}

/** The questions as flags, which name a question by its text; null where a flag cannot say it exactly. */
function flags(draft) {
  const said = draft.questions.map((question) => {
    const text = question.instructions.trim();
    const names = question.options.filter((option) => option.name.trim());
    const described = question.kind === "choice" ? names.some((option) => option.description.trim()) : false;
    if (question.name.trim() || text.length > 200 || described) return null;
    if (question.kind === "noul") return question.yes.trim() || question.no.trim() ? null : ["--yes-no", quotedAlways(text)];
    const parts = [text, ...names.map((option) => option.name.trim())];
    if (parts.some((part) => /[|:：\\]/.test(part))) return null;
    return [`--${question.kind}`, quotedAlways(`${text}: ${names.map((option) => option.name.trim()).join(" | ")}`)];
  });
  const kinds = said.map((flag) => flag && ["--yes-no", "--choice", "--score"].indexOf(flag[0]));
  const ordered = kinds.every((kind, place) => kind !== null && kind >= (kinds[place - 1] ?? 0)); // as `ask` orders them
  return ordered ? said : null;
}
