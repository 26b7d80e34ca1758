// Keep the parts of a page current: take changed parts from the server and change only what differs.

const main = document.getElementById("main");
const banner = document.getElementById("connection");
const RETRY_MS = 2000;

function follow() {
  const asked = new URLSearchParams({
    path: main.dataset.live,
    namespace: main.dataset.namespace,
    q: main.dataset.words,
    start: main.dataset.start,
  });
  const source = new EventSource(`/live?${asked}`);
  source.addEventListener("open", () => say(""));
  source.addEventListener("part", (event) => {
    const { id, html } = JSON.parse(event.data);
    const section = document.getElementById(`part-${id}`);
    if (section === null) return;
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    morph(section, fresh.content);
    showAges();
  });
  source.addEventListener("error", () => {
    say("The connection is lost. This page shows the last known state and tries again.");
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, RETRY_MS);
  });
}

function say(text) {
  banner.textContent = text;
  banner.hidden = text === "";
}

// Make the children of `now` like those of `wanted`. A child with a data-key stays the same element.
function morph(now, wanted) {
  const keyed = new Map();
  for (const child of now.children) if (child.dataset.key !== undefined) keyed.set(child.dataset.key, child);
  let at = now.firstChild;
  for (const next of [...wanted.childNodes]) {
    const same = next.nodeType === Node.ELEMENT_NODE && next.dataset.key !== undefined ? keyed.get(next.dataset.key) : alike(at, next) ? at : null;
    if (!same) {
      now.insertBefore(next, at);
      if (next.nodeType === Node.ELEMENT_NODE && next.dataset.key !== undefined) next.classList.add("new");
      continue;
    }
    if (same === at) at = at.nextSibling;
    else now.insertBefore(same, at);
    if (next.nodeType === Node.TEXT_NODE) {
      if (same.data !== next.data) same.data = next.data;
    } else if (next.nodeType === Node.ELEMENT_NODE) {
      copyAttributes(same, next);
      if (!next.dataset.since) morph(same, next);
    }
  }
  while (at !== null) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

function alike(one, other) {
  if (one === null || one.nodeType !== other.nodeType) return false;
  return one.nodeType !== Node.ELEMENT_NODE || (one.tagName === other.tagName && one.dataset.key === other.dataset.key);
}

function copyAttributes(to, from) {
  for (const { name } of [...to.attributes]) if (!from.hasAttribute(name) && name !== "open") to.removeAttribute(name);
  for (const { name, value } of from.attributes) if (to.getAttribute(name) !== value) to.setAttribute(name, value);
}

function showAges() {
  const now = Date.now() / 1000;
  for (const each of document.querySelectorAll("[data-since]")) {
    const text = age(Math.max(0, now - Number(each.dataset.since)));
    if (each.textContent !== text) each.textContent = text;
  }
}

function age(seconds) {
  if (seconds < 90) return `${Math.floor(seconds)} s ago`;
  if (seconds < 5400) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86400)} days ago`;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (button === null) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    document.querySelector(".search input").focus();
  } else if (event.key === "Escape" && typing) {
    event.target.blur();
  }
});

if (main !== null) {
  setInterval(showAges, 1000);
  showAges();
  follow();
}
