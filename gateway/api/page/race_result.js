// Result of a race in words: speeds, whether the texts are equal, and why speculation was not faster.

const FEW = 0.5; // acceptance rate below which Drafts seldom pay

// Tokens per second from the first token to the last; null for fewer than two tokens.
export function rate(times) {
  return times.length < 2 ? null : (1000 * (times.length - 1)) / (times.at(-1) - times[0]);
}

// Number of characters before the texts differ; null for equal texts.
export function parting(one, other) {
  if (one === other) return null;
  let index = 0;
  while (index < Math.min(one.length, other.length) && one[index] === other[index]) index += 1;
  return index;
}

export function verdict(plain, speculation) {
  const at = parting(plain.text, speculation.text);
  const ratio = rate(speculation.times) / rate(plain.times);
  const speed = Number.isFinite(ratio) && ratio > 0 ? `${ratio.toFixed(1)} times as fast` : "too short to compare speeds";
  if (at === null) return { ratio, isSame: true, text: `${speed}, same text` };
  const [left, right] = [plain, speculation].map(({ text }) => JSON.stringify(text.slice(at, at + 20)));
  const parts = `They part after ${at} characters: plain decoding goes on with ${left}, speculation with ${right}`;
  return { ratio, isSame: false, text: `THE TEXTS DIFFER. ${parts}. ${speed}` };
}

// Parameters: the usage of the answer with speculation, and the reply of /health.
export function whyNotFaster({ completion_tokens: tokens, speculation: report }, { workers = [], drafters = {} }) {
  const { rounds, drafted, reached, accepted, target_passes, late_drafts: late, lost_drafts: lost } = report;
  if (lost) return "The draft worker was lost on the way.";
  if (!rounds) {
    const reasons = workers.flatMap((worker) => Object.values(worker.no_drafts_because));
    if (reasons.length) return `Nothing was drafted, no drafter was ready: ${reasons.join("; ")}.`;
    if (!Object.keys(drafters).length) return "Nothing was drafted: the service has no drafter.";
    if (late) return "Nothing was drafted: the Draft was late.";
    return "Nothing was drafted: the pace chose depth 0, since plain decoding promised to be faster here.";
  }
  const share = reached ? accepted / reached : 0;
  const judged = `${accepted} of ${reached} drafted tokens that the target judged were accepted`;
  const alone = target_passes - rounds; // tokens of plain decoding
  if (alone > tokens / 2)
    return `The pace chose depth 0 for ${alone} of ${tokens} tokens, since it promised to be faster here; ${judged}.`;
  if (share < FEW) return `Acceptance was low: ${judged}. Text that is hard to foresee gains little.`;
  return (
    `Drafts took the time that they saved: ${judged}, in ${rounds} rounds of ` +
    `${(drafted / rounds).toFixed(1)} drafted tokens. A small target, or a busy machine, leaves little to gain.`
  );
}

export function asCurl(address, request, needsKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = needsKey ? ' -H "Authorization: Bearer $OUTRIDER_API_KEY"' : "";
  return `curl -N ${address}v1/completions -H 'Content-Type: application/json'${key} -d ${quoted(JSON.stringify(request))}`;
}

export function asPython(address, request, model, needsKey) {
  const { prompt, max_tokens, temperature, seed, speculation } = request;
  const key = needsKey ? 'os.environ["OUTRIDER_API_KEY"]' : '"none"';
  return `${needsKey ? "import os\n\n" : ""}import openai

client = openai.OpenAI(base_url=${JSON.stringify(`${address}v1`)}, api_key=${key})
answer = client.completions.create(
    model=${JSON.stringify(model)},
    prompt=${JSON.stringify(prompt)},
    max_tokens=${max_tokens},
    temperature=${temperature},
    seed=${seed},
    extra_body={"speculation": {"mode": ${JSON.stringify(speculation.mode)}, "report": True}},
)
print(answer.choices[0].text)
print(answer.usage)
`;
}
