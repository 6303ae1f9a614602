// Replies of /loads as numbers and as series for charts. Each gateway reports only its own numbers, so the
// newest replies of all gateways are summed.
import { KEPT } from "./chart.js";

const MAX_TASKS = 5;
const BY_TASK = "auto"; // in place of a drafter's name: the gateway chooses a drafter for each task
const FORGOTTEN_MS = 10_000; // milliseconds after which a silent gateway counts as gone

const total = (items, of) => items.reduce((sum, item) => sum + of(item), 0);
const totalIfKnown = (items, of) => (items.some((item) => of(item) === undefined) ? null : total(items, of));

export class Loads {
  constructor() {
    this.heard = new Map(); // key: gateway; value: time, newest reply, and the reply before
    this.series = new Map(); // key: chart and name; value: the newest points
    this.length = 0;
  }

  add(answer) {
    const now = performance.now();
    const before = this.heard.get(answer.gateway)?.newest;
    this.heard.set(answer.gateway, { at: now, newest: answer, before });
    for (const [gateway, { at }] of this.heard) if (now - at > FORGOTTEN_MS) this.heard.delete(gateway);
    this.push(this.values());
  }

  values() {
    const newest = [...this.heard.values()].map((heard) => heard.newest);
    const tasks = this.perSecond();
    const acceptance = Object.entries(tasks).map(([name, { reached, accepted }]) => [
      name,
      reached > 0 ? accepted / reached : null,
    ]);
    const depths = newest.flatMap((loads) => loads.depths);
    const sequences = total(depths, (depth) => depth.sequences);
    const isKnown = [...this.heard.values()].some(({ before }) => before);
    return {
      rate: {
        "with speculation": isKnown ? total(Object.values(tasks), (rates) => rates.tokens) : null,
        "plain would give": totalIfKnown(newest, (loads) => loads.plain_tokens_per_second) || null,
      },
      load: { running: total(newest, (loads) => loads.running), waiting: total(newest, (loads) => loads.waiting) },
      acceptance: Object.fromEntries(acceptance),
      depth: {
        "mean depth": sequences ? total(depths, (depth) => depth.sequences * depth.mean_depth) / sequences : null,
      },
    };
  }

  // Returns rates per second by task and drafter.
  perSecond() {
    const found = {};
    for (const { newest, before } of this.heard.values()) {
      const seconds = before ? newest.uptime_s - before.uptime_s : Infinity;
      for (const task of newest.tasks) {
        const old = before?.tasks.find(({ task: name, drafter }) => name === task.task && drafter === task.drafter);
        const rates = (found[`${task.task}, ${task.drafter}`] ??= { tokens: 0, reached: 0, accepted: 0 });
        for (const field of Object.keys(rates)) rates[field] += (task[field] - (old?.[field] ?? 0)) / seconds;
      }
    }
    return found;
  }

  // Returns which drafters drafted each task and why, and how good the guesses of other drafters were.
  routes() {
    const found = new Map();
    for (const { newest } of this.heard.values())
      for (const { task, drafter, routed = {}, drafted_by: drafts = {}, judged = {} } of newest.tasks) {
        if (drafter !== BY_TASK) continue;
        for (const name of new Set([...Object.keys(routed), ...Object.keys(drafts), ...Object.keys(judged)])) {
          const id = JSON.stringify([task, name]);
          if (!found.has(id)) found.set(id, { task, name, why: {}, rounds: 0, reached: 0, accepted: 0, guessed: 0, correct: 0 });
          const row = found.get(id);
          for (const [why, times] of Object.entries(routed[name]?.times ?? {})) row.why[why] = (row.why[why] ?? 0) + times;
          for (const field of ["rounds", "reached", "accepted"]) row[field] += drafts[name]?.[field] ?? 0;
          row.guessed += judged[name]?.reached ?? 0;
          row.correct += judged[name]?.correct ?? 0;
        }
      }
    return [...found.values()].sort((a, b) => a.task.localeCompare(b.task) || b.rounds - a.rounds);
  }

  // Returns the roll-outs of new drafts at each gateway, with the gateway's name if there are several gateways.
  rollouts() {
    const several = this.heard.size > 1;
    return [...this.heard.values()]
      .flatMap(({ newest }) =>
        (newest.rollouts ?? []).map((rollout) => ({ ...rollout, at: several ? ` at ${newest.gateway}` : "" })),
      )
      .sort((a, b) => a.task.localeCompare(b.task) || a.draft.localeCompare(b.draft));
  }

  // Returns the newest report on each worker, with the streams of all gateways.
  workers() {
    const found = new Map();
    for (const { newest } of this.heard.values())
      for (const worker of newest.workers) {
        const known = found.get(worker.address);
        const fresher = !known || (worker.reply_age_s ?? Infinity) < (known.reply_age_s ?? Infinity) ? worker : known;
        found.set(worker.address, { ...fresher, streams: worker.streams + (known?.streams ?? 0) });
      }
    return [...found.values()];
  }

  gap() {
    this.push({});
  }

  push(values) {
    this.length = Math.min(this.length + 1, KEPT);
    for (const [chart, named] of Object.entries(values))
      for (const name of Object.keys(named)) {
        const id = `${chart}/${name}`;
        if (!this.series.has(id)) this.series.set(id, Array(this.length - 1).fill(null));
      }
    for (const [id, points] of this.series) {
      const [chart, name] = [id.slice(0, id.indexOf("/")), id.slice(id.indexOf("/") + 1)];
      points.push(values[chart]?.[name] ?? null);
      if (points.length > KEPT) points.shift();
    }
  }

  charts() {
    const named = (chart) =>
      [...this.series]
        .filter(([id]) => id.startsWith(`${chart}/`))
        .map(([id, points]) => ({ name: id.slice(chart.length + 1), points }))
        .filter(({ points }) => points.some((value) => value !== null))
        .slice(0, MAX_TASKS);
    const percent = (value) => `${(100 * value).toFixed(0)} %`;
    const whole = (value) => value.toFixed(0);
    return [
      { title: "Tokens per second", series: named("rate"), format: whole },
      { title: "Requests", series: named("load"), format: whole },
      { title: "Acceptance by task and drafter", series: named("acceptance"), format: percent, max: 1 },
      { title: "Depth in force", series: named("depth"), format: (value) => value.toFixed(1) },
    ];
  }
}
