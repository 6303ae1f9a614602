// Live page: sends requests over the HTTP API like any other client, and polls /loads and /health once a second.
import { completion, fetched } from "./api.js";
import { Chart } from "./chart.js";
import { Loads } from "./loads.js";
import "./race.js";
import { roundItem } from "./rounds.js";
import { settingsOf } from "./settings.js";

const LOOK_MS = 1000;
const SHOWN_ROUNDS = 200;
const byId = (id) => document.getElementById(id);
let asking = null; // AbortController of the current answer

// ---- one answer ----

function request() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const mode = byId("mode").value;
  return {
    prompt: byId("prompt").value,
    max_tokens: number("tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    task: byId("task").value || undefined,
    speculation: {
      mode,
      depth: mode === "off" ? undefined : number("depth"),
      drafter: byId("drafter").value || undefined,
      report: true,
    },
    response_format: responseFormat(),
    stream: true,
    stream_options: { include_usage: true, include_rounds: true },
  };
}

// Returns undefined if the box is empty. Throws an error, which the page shows, if the text is not JSON.
function responseFormat() {
  const text = byId("schema").value.trim();
  if (!text) return undefined;
  try {
    return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } };
  } catch (error) {
    throw new Error(`The JSON schema is no JSON: ${error.message}`);
  }
}

class Answer {
  constructor() {
    byId("answer").replaceChildren();
    byId("rounds").replaceChildren();
    this.began = performance.now();
    this.tokens = 0;
    this.rounds = 0;
    this.seed = null;
  }

  add({ seed, tokens = [], round }) {
    this.seed ??= seed ?? null;
    if (round) this.addRound(round, tokens);
    for (const { text, origin } of tokens) {
      const span = document.createElement("span");
      span.className = `token ${origin}`;
      span.textContent = text;
      if (round) this.connect(span, byId(`round-${this.rounds}`));
      byId("answer").append(span);
    }
    this.tokens += tokens.length;
    this.say(`${this.tokens} tokens, ${this.rate()} tokens/s`);
  }

  addRound(round, tokens) {
    this.rounds += 1;
    const list = byId("rounds");
    const atEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 40;
    list.append(roundItem(this.rounds, round, tokens));
    if (list.children.length > SHOWN_ROUNDS) list.firstChild.remove();
    if (atEnd) list.scrollTop = list.scrollHeight;
  }

  connect(span, item) {
    span.addEventListener("mouseenter", () => {
      item.classList.add("shown");
      item.scrollIntoView({ block: "nearest" });
    });
    span.addEventListener("mouseleave", () => item.classList.remove("shown"));
  }

  rate() {
    return ((1000 * this.tokens) / (performance.now() - this.began)).toFixed(0);
  }

  ended({ completion_tokens, speculation }) {
    const { target_passes, accepted, drafted, forced, seed } = speculation;
    this.say(
      `${completion_tokens} tokens in ${target_passes} passes of the target, ${accepted} of ${drafted} drafted ` +
        `accepted, ${forced ? `${forced} forced, ` : ""}${this.rate()} tokens/s, seed ${seed}`,
    );
  }

  say(text, wrong = false) {
    byId("summary").textContent = text;
    byId("summary").classList.toggle("wrong", wrong);
  }
}

async function generate() {
  asking?.abort();
  const controller = (asking = new AbortController());
  const answer = new Answer();
  byId("stop").disabled = false;
  try {
    for await (const event of completion(request(), controller.signal)) {
      if (event.outrider) answer.add(event.outrider);
      if (event.usage) answer.ended(event.usage);
    }
  } catch (error) {
    if (!controller.signal.aborted) answer.say(error.message, true);
    else if (asking === controller) answer.say(`stopped after ${answer.tokens} tokens, seed ${answer.seed}`);
  } finally {
    if (asking === controller) byId("stop").disabled = true;
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("stop").addEventListener("click", () => asking?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) (document.activeElement.closest("form") ?? byId("ask")).requestSubmit();
  if (event.key === "Escape") asking?.abort();
});
byId("rounds").addEventListener("keydown", (event) => {
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  if (!step) return;
  event.preventDefault();
  document.activeElement[step]?.focus();
});

// ---- what the service does ----

const loads = new Loads();

function cell(text, className = "") {
  const td = document.createElement("td");
  td.textContent = text;
  td.className = className;
  return td;
}

function showWorkers(workers) {
  const rows = workers.map((worker) => {
    const row = document.createElement("tr");
    const heard = worker.reply_age_s !== undefined;
    const used = heard ? (worker.total_blocks - worker.free_blocks) / worker.total_blocks : 0;
    row.append(
      cell(worker.draft ? `${worker.role} ${worker.draft}` : worker.role),
      cell(worker.address),
      worker.suspect ? cell("lost just now", "ill") : cell("well", "well"),
      cell(worker.streams),
      cell(heard ? worker.running : "–"),
      cell(heard ? worker.waiting : "–"),
      cell(heard ? `${(100 * used).toFixed(0)} % of ${worker.total_blocks}` : "–"),
      cell(worker.step_ms === undefined ? "–" : `${worker.step_ms.toFixed(1)} ms`),
    );
    return row;
  });
  byId("workers").replaceChildren(...rows);
}

function showRoutes(routes) {
  const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");
  const rows = routes.map(({ task, name, why, rounds, reached, accepted, guessed, correct }) => {
    const row = document.createElement("tr");
    const times = Object.entries(why).map(([reason, count]) => `${reason} ${count}`);
    row.append(
      cell(task),
      cell(name),
      cell(times.join(", ") || "–"),
      cell(rounds),
      cell(share(accepted, reached)),
      cell(share(correct, guessed)),
    );
    return row;
  });
  byId("routes").replaceChildren(...rows);
  byId("routing").hidden = !rows.length;
}

function showRollouts(rollouts) {
  const speed = (rate) => (rate ? rate.toFixed(0) : "–");
  const rows = rollouts.map((rollout) => {
    const row = document.createElement("tr");
    const rule = rollout.verification === "coupled" ? "" : `, ${rollout.verification}`;
    row.append(
      cell(`${rollout.task}${rule}`),
      cell(`${rollout.draft}${rollout.at}`),
      cell(rollout.share ? `${(100 * rollout.share).toFixed(1)} %` : "nothing, it is judged"),
      cell(`${rollout.seen} of ${rollout.needed}`),
      cell(speed(rollout.tokens_per_second)),
      cell(speed(rollout.others_tokens_per_second)),
      cell(rollout.changes["0"] ?? 0),
    );
    return row;
  });
  byId("rollouts").replaceChildren(...rows);
  byId("rolling-out").hidden = !rows.length;
}

function showSettings(health) {
  byId("model").textContent = health.gateway.model;
  const [shown, settings] = [byId("settings"), settingsOf(health)];
  // Unchanged settings are not replaced, so that their text can be selected.
  if (!settings.isEqualNode(shown)) shown.replaceWith(settings);
}

function offerDrafters(health) {
  const select = byId("drafter");
  if (select.options.length > 1) return;
  for (const [name, meaning] of Object.entries(health.drafters)) {
    const option = new Option(name);
    option.title = meaning;
    select.add(option);
  }
}

function showStatus(text, well) {
  byId("status").textContent = text;
  byId("status").className = well ? "well" : "ill";
}

const charts = new Map(); // key: title

function showCharts() {
  for (const shown of loads.charts()) {
    if (!charts.has(shown.title)) {
      charts.set(shown.title, new Chart(shown.title));
      byId("charts").append(charts.get(shown.title).figure);
    }
    charts.get(shown.title).show(shown);
  }
}

byId("to-configuration").addEventListener("click", () => {
  byId("configuration").open = true;
});

async function look() {
  try {
    const [now, health] = await Promise.all([fetched("loads"), fetched("health")].map(async (r) => (await r).json()));
    loads.add(now);
    showWorkers(loads.workers());
    showRoutes(loads.routes());
    showRollouts(loads.rollouts());
    showSettings(health);
    offerDrafters(health);
    showStatus(health.status, health.status === "ok");
  } catch (error) {
    loads.gap();
    showStatus(error.message, false);
  }
  showCharts();
}

async function lookAlways() {
  await look();
  setTimeout(lookAlways, LOOK_MS);
}
lookAlways();
