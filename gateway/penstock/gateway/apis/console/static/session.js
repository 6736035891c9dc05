/** Requests to the server, with the key that the user has typed. It lives in this variable: not in a cookie, not in the
 * browser's storage, and it is gone with the page. */

let key = "";

export const setKey = (text) => { key = text.trim(); };
export const hasKey = () => key !== "";

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** As fetch, with our headers. Raises ServerError with the server's own words. */
export async function request(path, { method = "GET", body, signal, headers = {} } = {}) {
  const own = { "x-penstock-console": "1", ...headers };
  if (key) own.authorization = `Bearer ${key}`;
  if (body !== undefined) own["content-type"] = "application/json";
  const response = await fetch(path, {
    method, signal, headers: own, body: body === undefined ? undefined : JSON.stringify(body),
    credentials: "omit", cache: "no-store", redirect: "error", referrerPolicy: "no-referrer",
  });
  if (!response.ok) throw new ServerError(response.status, await reason(response));
  return response;
}

export const json = async (path, options) => (await request(path, options)).json();

async function reason(response) {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch {
    return text.slice(0, 300) || `status ${response.status}`;
  }
}

/** The events of a stream: objects from its data, until "[DONE]" or its end. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
