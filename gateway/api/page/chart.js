// A line chart of the last two minutes as SVG. Points that are null leave a gap.

export const KEPT = 120; // points, one a second
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, TOP] = [KEPT - 1, 100, 6]; // of the drawing; the largest value is at TOP

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function path(points, max) {
  let drawn = "";
  points.forEach((value, index) => {
    if (value === null) return;
    const x = WIDTH - (points.length - 1 - index);
    const y = HEIGHT - ((HEIGHT - TOP) * value) / max;
    const starts = (points[index - 1] ?? null) === null;
    drawn += `${starts ? "M" : "L"}${x} ${y.toFixed(2)}`;
    // A point between two gaps is a short line, else it would not be seen.
    if (starts && (points[index + 1] ?? null) === null) drawn += "h0.7";
  });
  return drawn;
}

export function chart({ title, series, format, max }) {
  const known = series.flatMap(({ points }) => points.filter((value) => value !== null));
  const top = max ?? Math.max(1, ...known);
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const bold = document.createElement("b");
  bold.textContent = title;
  caption.append(bold, known.length ? `, up to ${format(top)}` : "");
  const svg = element("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": title,
  });
  for (const y of [TOP, HEIGHT]) svg.append(element("line", { x1: 0, x2: WIDTH, y1: y, y2: y }));
  const names = document.createElement("div");
  names.className = "names";
  series.forEach(({ name, points }, index) => {
    svg.append(element("path", { d: path(points, top), class: `series-${index}` }));
    const label = document.createElement("span");
    const newest = points.findLast((value) => value !== null);
    label.className = `series-${index}`;
    label.textContent = `${index % 2 ? "┄" : "━"} ${name} ${newest === undefined ? "–" : format(newest)}`;
    names.append(label);
  });
  figure.append(caption, names, svg);
  return figure;
}
