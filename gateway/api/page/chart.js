// A line chart of the last two minutes as SVG, with axes. Points that are null leave a gap. Pointing at it, or
// the arrow keys, show the values of one second.

export const KEPT = 120; // points, one a second
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, TOP] = [KEPT - 1, 100, 6]; // size of the drawing; the largest value is at TOP
const STEPS = { ArrowLeft: 1, ArrowRight: -1 }; // seconds further back

function svgElement(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
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
    // A point between two gaps is drawn as a short line, since it would be invisible otherwise.
    if (starts && (points[index + 1] ?? null) === null) drawn += "h0.7";
  });
  return drawn;
}

export class Chart {
  constructor(title) {
    this.title = title;
    this.ago = null; // seconds before now that are pointed at
    this.figure = element("figure", "");
    this.caption = element("figcaption", "");
    this.names = element("div", "names");
    this.values = element("div", "values");
    this.svg = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: 0 });
    const times = element("div", "times");
    times.append(...["2 min ago", "1 min ago", "now"].map((text) => element("span", "", text)));
    const plot = element("div", "plot");
    plot.append(this.values, this.svg, times);
    this.figure.append(this.caption, this.names, plot);
    this.svg.addEventListener("pointermove", ({ clientX }) => {
      const { left, width } = this.svg.getBoundingClientRect();
      this.point(WIDTH - Math.round((WIDTH * (clientX - left)) / width));
    });
    for (const leaves of ["pointerleave", "blur"]) this.svg.addEventListener(leaves, () => this.point(null));
    this.svg.addEventListener("keydown", (event) => {
      if (!(event.key in STEPS)) return;
      event.preventDefault();
      this.point((this.ago ?? 0) + STEPS[event.key]);
    });
  }

  point(ago) {
    this.ago = ago === null ? null : Math.min(Math.max(ago, 0), WIDTH);
    this.draw();
  }

  show({ series, format, max }) {
    const known = series.flatMap(({ points }) => points.filter((value) => value !== null));
    Object.assign(this, { series, format, top: max ?? Math.max(1, ...known) });
    this.draw();
  }

  valueOf(points) {
    const value = this.ago === null ? points.findLast((point) => point !== null) : points.at(-1 - this.ago);
    return value === undefined || value === null ? "–" : this.format(value);
  }

  draw() {
    this.caption.replaceChildren(element("b", "", this.title), this.ago === null ? "" : `, ${this.ago} s ago`);
    this.values.replaceChildren(...[this.top, this.top / 2, 0].map((value) => element("span", "", this.format(value))));
    const lines = [TOP, (TOP + HEIGHT) / 2, HEIGHT].map((y) => svgElement("line", { x1: 0, x2: WIDTH, y1: y, y2: y }));
    const drawn = this.series.map(({ points }, index) =>
      svgElement("path", { d: path(points, this.top), class: `series-${index}` }),
    );
    const x = WIDTH - this.ago;
    const pointed = this.ago === null ? [] : [svgElement("line", { x1: x, x2: x, y1: 0, y2: HEIGHT, class: "pointed" })];
    this.svg.replaceChildren(...lines, ...drawn, ...pointed);
    const labels = this.series.map(({ name, points }, index) => {
      return element("span", `series-${index}`, `${index % 2 ? "┄" : "━"} ${name} ${this.valueOf(points)}`);
    });
    this.names.replaceChildren(...labels);
    this.svg.setAttribute("aria-label", [this.caption.textContent, ...labels.map((label) => label.textContent)].join(", "));
  }
}
