// A round as a row: its Draft with the accepted tokens, the target's own token, and a time line.

function token(text, className) {
  const span = document.createElement("span");
  span.className = `token ${className}`;
  span.textContent = text.replaceAll("\n", "⏎").replace(/^ | $/g, "␣");
  return span;
}

// A node was reached if its parent was accepted. If a reached node was not accepted, the target refused it.
function kindOf(node, { parents, accepted }) {
  if (accepted.includes(node)) return "accepted";
  return parents[node] === -1 || accepted.includes(parents[node]) ? "refused" : "unreached";
}

function timeLine({ draft_ms, target_ms, queue_ms, step_ms, reason, ahead_hit, continued, drafter, because }) {
  const wire = Math.max(target_ms - queue_ms - step_ms, 0);
  const step = Math.min(step_ms, target_ms);
  const parts = { draft: draft_ms, wire, queue: Math.min(queue_ms, target_ms), step };
  const whole = Object.values(parts).reduce((sum, ms) => sum + ms, 0) || 1;
  const box = document.createElement("div");
  box.className = "time";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 1");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  let x = 0;
  for (const [name, ms] of Object.entries(parts)) {
    const rect = document.createElementNS(svg.namespaceURI, "rect");
    const width = (100 * ms) / whole;
    for (const [attribute, value] of Object.entries({ x, y: 0, width, height: 1, class: `part-${name}` }))
      rect.setAttribute(attribute, value);
    svg.append(rect);
    x += width;
  }
  box.append(svg);
  const names = { draft: "waited for the Draft", wire: "wire and gateway", queue: "target’s queue", step: "target’s step" };
  for (const [name, ms] of Object.entries(parts)) {
    const label = document.createElement("span");
    label.className = `part-${name}`;
    label.textContent = `■ ${names[name]} ${ms.toFixed(1)} ms`;
    box.append(label);
  }
  const how = continued ? "the target went on by itself" : ahead_hit ? "the Draft was foreseen" : "the Draft was asked for";
  const why = document.createElement("div");
  why.textContent = `depth: ${reason}; drafted by ${drafter} (${because}); ${how}`;
  box.append(why);
  return box;
}

export function roundItem(number, round, tokens) {
  const item = document.createElement("li");
  item.id = `round-${number}`;
  item.tabIndex = 0;
  const draft = document.createElement("div");
  draft.className = "draft";
  const label = document.createElement("span");
  label.className = "number";
  label.textContent = `${number}.`;
  draft.append(label, ...round.drafted.map((text, node) => token(text, kindOf(node, round))));
  const own = tokens.find(({ origin }) => origin === "target");
  if (own) draft.append("→", token(own.text || "end of the answer", "target"));
  item.append(draft, timeLine(round));
  const said = `Round ${number}: ${round.accepted.length} of ${round.drafted.length} drafted tokens accepted`;
  item.setAttribute("aria-label", said);
  return item;
}
