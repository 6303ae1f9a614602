// Requests to the service that serves this page, with the visitor's key.

const byId = (id) => document.getElementById(id);

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

byId("access").addEventListener("submit", (event) => event.preventDefault());

// Returns an error with the service's message, and with advice if the service is full.
async function refusal(response) {
  const { message } = (await response.json()).error;
  if (response.status !== 429) return new Error(message);
  const delay = response.headers.get("Retry-After");
  return new Error(`The service is full, try again ${delay ? `in ${delay} s` : "later"}: ${message}`);
}

export async function fetched(path, options = {}) {
  const response = await fetch(path, { headers: headers(), ...options });
  if (response.status === 401) byId("access").hidden = false;
  if (!response.ok && response.status !== 503) throw await refusal(response);
  return response;
}

// Yields the events of a streamed completion.
export async function* completion(request, signal) {
  const response = await fetched("v1/completions", { method: "POST", body: JSON.stringify(request), signal });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (text + value).split("\n\n");
    text = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
