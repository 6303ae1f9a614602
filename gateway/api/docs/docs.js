// Shows /openapi.json: each path with its request and its responses, and the schemas that these consist of.
const description = await (await fetch("openapi.json")).json();

function element(name, text, ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

const nameOf = (schema) => schema.$ref.split("/").at(-1);
const resolved = (schema) => (schema.$ref ? description.components.schemas[nameOf(schema)] : schema);

function kind(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.map(kind).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items) : "anything"}`;
  return schema.type ?? "anything";
}

function limits(schema) {
  const names = { minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<" };
  return Object.keys(names).filter((name) => name in schema).map((name) => `${names[name]} ${schema[name]}`).join(", ");
}

function table(titles, rows) {
  const cells = (row, name) => row.map((cell) => (cell instanceof Node ? element(name, "", cell) : element(name, cell)));
  const head = element("tr", "", ...cells(titles, "th"));
  return element("table", "", head, ...rows.map((row) => element("tr", "", ...cells(row, "td"))));
}

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, part]) => [
    element("code", name),
    [kind(part), limits(part)].filter(Boolean).join(", "),
    required.has(name) ? "always there" : JSON.stringify(part.default) ?? "may be left out",
    part.description ?? "",
  ]);
  return table(["field", "is", "default", "meaning"], rows);
}

function answers(operation) {
  const rows = Object.entries(operation.responses).map(([status, told]) => {
    const bodies = Object.entries(told.content ?? {}).map(([type, body]) => `${type}: ${kind(body.schema)}`);
    return [status, told.description, bodies.join("; "), Object.keys(told.headers ?? {}).join(", ")];
  });
  return table(["status", "meaning", "body", "headers"], rows);
}

for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const title = element("summary", "", element("code", `${method.toUpperCase()} ${path}`));
    const shown = element("details", "", title, element("p", operation.description ?? operation.summary ?? ""));
    const body = operation.requestBody?.content["application/json"].schema;
    if (body) shown.append(fields(resolved(body)));
    shown.append(answers(operation));
    document.getElementById("paths").append(shown);
  }
}

for (const [name, schema] of Object.entries(description.components.schemas)) {
  const shown = schema.properties ? fields(schema) : element("p", kind(schema));
  document.getElementById("parts").append(
    element("details", "", element("summary", "", element("code", name)), element("p", schema.description ?? ""), shown));
}
