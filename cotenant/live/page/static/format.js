// Numbers as people read them, and elements whose text is only ever text.

export const NONE = "–";

function significant(value) {
  if (value >= 999.5) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value < 0.05 ? "0" : significant(value < 10 ? Math.round(value * 10) / 10 : value);
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  if (value < 1e-3) return `${significant(value * 1e6)} µs`;
  return value < 1 ? `${significant(value * 1e3)} ms` : `${significant(value)} s`;
}

// Never rounded up to the next whole percent: 99.96 % is not 100 %.
export function percent(value, digits = 1) {
  if (value === null || value === undefined) return NONE;
  const scale = 10 ** digits;
  return `${Number((Math.floor(value * 100 * scale + 1e-6) / scale).toFixed(digits))} %`;
}

export function bytes(value) {
  if (!value) return NONE;
  return value >= 2 ** 30 ? `${significant(value / 2 ** 30)} GiB` : `${significant(value / 2 ** 20)} MiB`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

// So many seconds from now, or ago.
export function ahead(left) {
  const size = Math.abs(left);
  if (size < 1) return "now";
  const text = size < 100 ? `${Math.round(size)} s` : size < 6000 ? `${Math.round(size / 60)} min` : size < 360000 ? `${Math.round(size / 3600)} h` : `${Math.round(size / 86400)} d`;
  return left > 0 ? `in ${text}` : `${text} ago`;
}

export function when(time) {
  const date = new Date(time * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return today ? clock(time) : `${date.toISOString().slice(0, 10)} ${clock(time)}`;
}

// element("p", "hint", "text", child…): strings become text, never markup.
export function element(tag, names = "", ...children) {
  const made = document.createElement(tag);
  if (names) made.className = names;
  made.append(...children);
  return made;
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function setData(target, name, value) {
  if (target.dataset[name] !== value) target.dataset[name] = value;
}

// Terms with their values, in a <dl> that keeps its elements: a reader's cursor stays where it is.
export function setFacts(list, facts) {
  const wanted = facts.filter(([, value]) => value !== "");
  while (list.children.length > wanted.length) list.lastChild.remove();
  while (list.children.length < wanted.length) list.append(element("div", "", element("dt"), element("dd")));
  wanted.forEach(([term, value, note], index) => {
    const item = list.children[index];
    setText(item.children[0], term);
    setText(item.children[1], value);
    setData(item, "level", note ?? "");
  });
}
