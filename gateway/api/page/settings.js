// Running configuration: settings of workers, gateway and pace from /health.

function element(tag, text = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function group(title, settings) {
  const section = element("section");
  const list = element("dl");
  const written = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));
  for (const [name, value] of Object.entries(settings))
    list.append(element("dt", name), element("dd", value === null ? "none" : written(value)));
  section.append(element("h3", title), list);
  return section;
}

// Groups workers that have equal settings.
function alike(workers) {
  const groups = new Map();
  for (const { role, model, settings, address } of workers) {
    const same = JSON.stringify([role, model, settings]);
    if (!groups.has(same)) groups.set(same, { role, settings: { model, ...settings }, addresses: [] });
    groups.get(same).addresses.push(address);
  }
  return [...groups.values()];
}

export function settingsOf({ workers, gateway, pace }) {
  const box = element("div");
  box.id = "settings";
  for (const { role, settings, addresses } of alike(workers))
    box.append(group(`${role} at ${addresses.join(", ")}`, settings));
  box.append(group("gateway", gateway), group("pace", pace));
  return box;
}
