// Numbers in words: bytes, seconds, rates, shares, times of day.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Three significant digits, without needless zeros: 0.123, 1.23, 12.3, 123, 1,234. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.095 ? 2 : 3;
  return Number(value.toFixed(digits)).toLocaleString("en-US");
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  let rest = value;
  while (rest >= 1024 && unit < UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? rest : number(rest)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Two times, with the unit once if it is the same: "20 / 64 ms". */
export function range(low, high) {
  const [one, two] = [seconds(low), seconds(high)];
  const unit = one.split(" ").at(-1);
  return two.split(" ").at(-1) === unit && high < 60 ? `${one.split(" ")[0]} / ${two}` : `${one} / ${two}`;
}

/** A part of a whole in percent; "" if there is no whole. */
export function share(part, whole) {
  if (!whole) return "";
  const percent = (100 * part) / whole;
  if (percent > 0 && percent < 1) return "<1%";
  return `${Math.round(percent)}%`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function plural(count, noun) {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}
