// Numbers and times as people read them.

const NUMBER = new Intl.NumberFormat("en");
const MOMENT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export function count(number) {
  return number === undefined || number === null ? "–" : NUMBER.format(Math.round(number));
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function percent(share) {
  if (share > 0 && share < 0.001) return "<0.1%";
  if (share < 1 && share > 0.999) return ">99.9%";
  return `${(100 * share).toFixed(1)}%`;
}

/** A length of time, in seconds, in the two largest units that say something. */
export function duration(seconds) {
  if (seconds === undefined || seconds === null || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 60) return `${s.toFixed(1)} s`;
  const units = [["d", 86_400], ["h", 3_600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => s >= size);
  const [[name, size], next] = [units[first], units[first + 1]];
  const rest = Math.floor((s % size) / next[1]);
  return `${Math.floor(s / size)} ${name}${rest ? ` ${rest} ${next[0]}` : ""}`;
}

export function ago(at, now = Date.now() / 1000) {
  const s = Math.max(0, now - at);
  if (s < 5) return "just now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3_600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86_400) return `${Math.floor(s / 3_600)} h ago`;
  return `${Math.floor(s / 86_400)} d ago`;
}

export function moment(at) {
  return MOMENT.format(new Date(1000 * at));
}

export function bytes(size) {
  const units = ["B", "KB", "MB", "GB"];
  let value = size;
  while (value >= 1000 && units.length > 1) {
    value /= 1000;
    units.shift();
  }
  return `${value >= 10 || units[0] === "B" ? Math.round(value) : value.toFixed(1)} ${units[0]}`;
}
