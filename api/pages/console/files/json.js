// JSON with its digits and the order of its keys kept, which JavaScript's own objects and numbers would lose.

/** JSON text that goes in as it was written. */
export class Raw {
  constructor(text) {
    this.text = text;
  }
}

/** An object by its pairs: JavaScript's own would put a key like "10" before the others. */
export class Pairs {
  constructor(pairs) {
    this.pairs = pairs.filter(([, value]) => value !== undefined);
  }

  get(name) {
    return this.pairs.find(([key]) => key === name)?.[1];
  }
}

const TOKENS = /"[^"\\]*(?:\\.[^"\\]*)*"|[{}[\],:]|[^\s{}[\],:"]+/g;

/** What JSON text says: objects as Pairs, numbers as Raw. Raises SyntaxError. */
export function parse(text) {
  const tokens = text.matchAll(TOKENS);
  const next = () => tokens.next().value?.[0];
  const value = (token) => {
    if (token === "[") {
      const list = [];
      for (let one = next(); one !== "]"; one = next()) list.push(value(one === "," ? next() : one));
      return list;
    }
    if (token === "{") {
      const pairs = [];
      for (let one = next(); one !== "}"; one = next()) {
        const name = JSON.parse(one === "," ? next() : one);
        next(); // the colon
        pairs.push([name, value(next())]);
      }
      return new Pairs(pairs);
    }
    const plain = JSON.parse(token);
    return typeof plain === "number" ? new Raw(token) : plain;
  };
  return value(next());
}

export const JSON_WORDS = { null: "null", true: "true", false: "false", raw: (text) => text };

/** A value as text; over several lines where one would be long, if `indent` is not null. `words` may be another language's. */
export function write(value, indent = null, words = JSON_WORDS) {
  if (value instanceof Raw) return words.raw(value.text, indent);
  if (value === null || typeof value === "boolean") return words[value];
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const pairs = value instanceof Pairs ? value.pairs : Object.entries(value);
  const inner = indent === null ? null : `${indent}  `;
  const parts = list
    ? value.map((one) => write(one, inner, words))
    : pairs.map(([name, one]) => `${JSON.stringify(name)}: ${write(one, inner, words)}`);
  const [open, close] = list ? "[]" : "{}";
  const line = `${open}${parts.join(", ")}${close}`;
  if (indent === null || (line.length < 84 && !line.includes("\n"))) return line;
  return `${open}\n${parts.map((part) => inner + part).join(",\n")}\n${indent}${close}`;
}

/** A JSON value as a prompt says it: a text as it is, anything else as JSON in a line. */
export function told(value) {
  return typeof value === "string" ? value : write(value);
}
