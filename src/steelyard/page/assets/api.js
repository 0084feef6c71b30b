// Asking the server: problems come back as one line, and whatever changes something carries the page's own token.

import { meta } from "./dom.js";

async function answer(response) {
  const kind = response.headers.get("content-type") ?? "";
  const body = kind.startsWith("application/json") ? await response.json() : await response.text();
  if (!response.ok) throw new Error(body.problem ?? body.detail ?? (String(body).trim() || response.statusText));
  return body;
}

function address(path, query) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") search.append(name, one);
    }
  }
  const text = search.toString();
  return text ? `${path}?${text}` : path;
}

export const get = async (path, query, signal) => answer(await fetch(address(path, query), { signal }));

export async function download(path, query, name) {
  const response = await fetch(address(path, query));
  if (!response.ok) await answer(response);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export const post = async (path, body) =>
  answer(
    await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", "x-steelyard-page": meta("page-token") },
      body: JSON.stringify(body),
    }),
  );

export const events = (runs) => new EventSource(address("/api/events", { run: runs }));
