// Answers of /loads, some time apart, as series to draw. Each of several gateways knows only its own.
import { KEPT } from "./chart.js";

const MAX_TASKS = 5;

export class Loads {
  constructor() {
    this.gateways = new Map(); // by id: the newest answer
    this.series = new Map(); // by chart and name: the newest values
    this.length = 0;
  }

  add(loads) {
    const before = this.gateways.get(loads.gateway);
    this.gateways.set(loads.gateway, loads);
    const seconds = before ? loads.uptime_s - before.uptime_s : 0;
    const old = new Map((before?.tasks ?? []).map((task) => [`${task.task}, ${task.drafter}`, task]));
    let tokens = 0;
    const acceptance = {};
    for (const task of loads.tasks) {
      const name = `${task.task}, ${task.drafter}`;
      const since = (field) => task[field] - (old.get(name)?.[field] ?? 0);
      tokens += since("tokens");
      if (task.verified > 0) acceptance[name] = since("verified") > 0 ? since("accepted") / since("verified") : null;
    }
    const sequences = loads.depths.reduce((sum, depth) => sum + depth.sequences, 0);
    const depth = loads.depths.reduce((sum, { sequences, mean_depth }) => sum + sequences * mean_depth, 0);
    this.push({
      rate: {
        "with speculation": seconds > 0 ? tokens / seconds : null,
        "plain would give": loads.plain_tokens_per_second || null,
      },
      load: { running: loads.running, waiting: loads.waiting },
      acceptance,
      depth: { "mean depth": sequences ? depth / sequences : null },
    });
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
