// Elements and numbers. All text goes in as text nodes and attributes: nothing from a model is ever parsed as HTML.
const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "disabled" || name === "checked") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
};

const bytesText = (count) => {
  if (count == null) return "";
  let value = Math.abs(count), place = 0;
  const units = ["B", "kB", "MB", "GB", "TB"];
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${count < 0 ? "−" : ""}${place ? value.toFixed(1) : Math.round(value)} ${units[place]}`;
};

const changeText = (count) => (count > 0 ? "+" : "") + bytesText(count);

const secondsText = (seconds) => {
  if (seconds == null) return "";
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toPrecision(3)} µs`;
};

const flopsText = (count) => {
  for (const [unit, factor] of [["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["kFLOP", 1e3]])
    if (count >= factor) return `${(count / factor).toPrecision(3)} ${unit}`;
  return `${count} FLOP`;
};

// Blue over gray to yellow (cividis, which the color-blind see as well) by the logarithm of the share of the largest.
const CIVIDIS = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
const heat = (value, largest) => {
  if (!(value > 0) || !(largest > 0)) return null;
  const place = (CIVIDIS.length - 1) * Math.max(0, 1 + Math.log10(value / largest) / 3);
  const below = Math.min(CIVIDIS.length - 2, Math.floor(place));
  const mixed = CIVIDIS[below].map((one, i) => Math.round(one + (place - below) * (CIVIDIS[below + 1][i] - one)));
  return `rgb(${mixed.join(", ")})`;
};
