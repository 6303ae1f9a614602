// Shows what /openapi.json says: each path, and the fields of its body.
const description = await (await fetch("openapi.json")).json();

function element(name, text, ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

// A part of a schema that another place holds: "#/paths/~1v1~1completions/post/..."
function resolved(schema) {
  if (!schema.$ref) return schema;
  const steps = schema.$ref.slice(2).split("/").map((step) => step.replaceAll("~1", "/").replaceAll("~0", "~"));
  return steps.reduce((part, step) => part[step], description);
}

function kind(given) {
  const schema = resolved(given);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.anyOf) return schema.anyOf.map(kind).join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items)}`;
  return schema.type ?? "anything";
}

function limits(schema) {
  const names = { minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<" };
  return Object.keys(names).filter((name) => name in schema).map((name) => `${names[name]} ${schema[name]}`).join(", ");
}

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, part]) =>
    element("tr", "",
      element("td", "", element("code", name)),
      element("td", [kind(part), limits(part)].filter(Boolean).join(", ")),
      element("td", required.has(name) ? "needed" : JSON.stringify(part.default ?? null)),
      element("td", part.description ?? "")));
  const head = ["field", "accepted", "default", "meaning"].map((title) => element("th", title));
  return element("table", "", element("tr", "", ...head), ...rows);
}

function codes(operation) {
  const rows = Object.entries(operation.responses ?? {}).map(([code, told]) =>
    element("tr", "", element("td", code), element("td", told.description)));
  return element("table", "", ...rows);
}

for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const title = element("summary", "", element("code", `${method.toUpperCase()} ${path}`));
    const shown = element("details", "", title, element("p", operation.description ?? operation.summary ?? ""));
    const body = operation.requestBody?.content["application/json"].schema;
    if (body) shown.append(fields(body));
    shown.append(codes(operation));
    document.getElementById("paths").append(shown);
  }
}
