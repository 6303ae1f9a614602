// Race: a prompt and a seed, answered by plain decoding and then with speculation.
import { completion, fetched } from "./api.js";
import { asCurl, asPython, rate, verdict, whyNotFaster } from "./race_result.js";

const WARM_UP_TOKENS = 4;
const MODES = { plain: "off", speculation: "auto" };
const PROMPTS = {
  code: 'def generate_tokens(readline):\n    """Tokenize a source reading Python code as unicode strings.\n\n    This has the same API as tokenize(), except',
  prose: "Send and log an error reply.\n\nArguments are\n* code:    an HTTP error code\n           3 digits\n* message: a simple",
  json: '{\n  "type": "person",\n  "id": 38,',
  arithmetic: "Add to 15:\n15 + 1 = 16",
};
const byId = (id) => document.getElementById(id);
let racing = null; // AbortController of the current race

class Side {
  constructor(name) {
    this.box = byId(`race-${name}`);
    this.shown = this.box.querySelector(".raced");
    this.clock = this.box.querySelector(".clock");
    this.shown.replaceChildren();
    this.clock.textContent = "waits";
    this.text = "";
    this.times = [];
    this.usage = null;
  }

  async run(request, signal) {
    this.began = performance.now();
    this.isRunning = true;
    this.tick();
    try {
      for await (const { outrider, usage } of completion(request, signal)) {
        for (const token of outrider?.tokens ?? []) this.add(token);
        this.usage = usage ?? this.usage;
      }
    } finally {
      this.isRunning = false;
      this.show((this.times.at(-1) ?? performance.now()) - this.began);
    }
  }

  add({ text, origin }) {
    const span = document.createElement("span");
    span.className = `token ${origin}`;
    span.textContent = text;
    this.shown.append(span);
    this.text += text;
    this.times.push(performance.now());
  }

  tick() {
    if (!this.isRunning) return;
    this.show(performance.now() - this.began);
    requestAnimationFrame(() => this.tick());
  }

  show(ms) {
    const speed = rate(this.times);
    const tokens = `${this.times.length} tokens, ${speed === null ? "–" : speed.toFixed(0)} tokens/s`;
    this.clock.textContent = `${(ms / 1000).toFixed(2)} s, ${tokens}`;
  }
}

function request(side) {
  return {
    prompt: byId("race-prompt").value,
    max_tokens: Number(byId("race-tokens").value),
    temperature: Number(byId("race-temperature").value),
    seed: Number(byId("race-seed").value),
    speculation: { mode: MODES[side], report: true },
    stream: true,
    stream_options: { include_usage: true, include_rounds: true },
  };
}

function say(text, why = "", isWrong = false) {
  byId("race-result").textContent = text;
  byId("race-result").classList.toggle("wrong", isWrong);
  byId("race-why").textContent = why;
}

async function race() {
  racing?.abort();
  const { signal } = (racing = new AbortController());
  const [plain, speculation] = [new Side("plain"), new Side("speculation")];
  byId("race-stop").disabled = false;
  try {
    say("Warm-up: a few tokens of this prompt, unmeasured.");
    for await (const _ of completion({ ...request("speculation"), max_tokens: WARM_UP_TOKENS }, signal));
    say("Plain decoding runs.");
    await plain.run(request("plain"), signal);
    say("Speculation runs.");
    await speculation.run(request("speculation"), signal);
    const { text, ratio, isSame } = verdict(plain, speculation);
    const why = ratio <= 1 ? whyNotFaster(speculation.usage, await (await fetched("health")).json()) : "";
    if (!signal.aborted) say(text, why, !isSame);
  } catch (error) {
    if (racing.signal === signal) say(signal.aborted ? "Stopped." : error.message, "", !signal.aborted);
  } finally {
    if (racing.signal === signal) byId("race-stop").disabled = true;
  }
}

// Without TLS a page may not write to the clipboard, so the text is selected instead.
async function offer(text) {
  const box = byId("race-copy");
  box.hidden = false;
  box.value = text;
  box.focus();
  box.select();
  try {
    await navigator.clipboard.writeText(text);
    byId("race-copied").textContent = "Copied.";
  } catch {
    byId("race-copied").textContent = "Selected: copy it with Ctrl+C.";
  }
}

const address = () => new URL(".", document.baseURI).href;
const needsKey = () => Boolean(byId("key").value);

byId("race").addEventListener("submit", (event) => {
  event.preventDefault();
  race();
});
for (const button of document.querySelectorAll("#race [data-kind]"))
  button.addEventListener("click", () => {
    byId("race-prompt").value = PROMPTS[button.dataset.kind];
    byId("race").requestSubmit();
  });
byId("race-prompt").value = PROMPTS.json;
byId("race-stop").addEventListener("click", () => racing?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") racing?.abort();
});
byId("race-curl").addEventListener("click", () => offer(asCurl(address(), request("speculation"), needsKey())));
byId("race-python").addEventListener("click", () =>
  offer(asPython(address(), request("speculation"), byId("model").textContent, needsKey())),
);
