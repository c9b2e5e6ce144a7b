// Fetches the page anew and puts its content in place: the scroll, the focus and what was unfolded stay as they are.
"use strict";
const EVERY_MS = 15000;
const main = document.getElementById("main");
const fresh = document.getElementById("fresh");
const pause = document.getElementById("pause");
let shown = main.innerHTML;
let paused = false;

const path = (element) => {
  const steps = [];
  for (let at = element; at && at !== main; at = at.parentElement) steps.unshift([...at.parentElement.children].indexOf(at));
  return steps;
};
const follow = (steps) => steps.reduce((at, step) => at && at.children[step], main);

const replace = (content) => {
  const active = main.contains(document.activeElement) && document.activeElement !== main ? path(document.activeElement) : null;
  const open = [...main.querySelectorAll("details[open]")].map(path);
  const aside = [...main.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const [x, y] = [window.scrollX, window.scrollY];
  main.replaceChildren(...content.childNodes);
  for (const steps of open) {
    const again = follow(steps);
    if (again instanceof HTMLDetailsElement) again.open = true;
  }
  [...main.querySelectorAll(".scroll")].forEach((one, i) => { one.scrollLeft = aside[i] || 0; });
  const focused = active && follow(active);
  if (focused) focused.focus({ preventScroll: true });
  window.scrollTo(x, y);
};

const say = (text, wrong) => {
  if (fresh.textContent !== text) fresh.textContent = text;
  fresh.classList.toggle("wrong", wrong);
};

const refresh = async () => {
  if (!paused && !document.hidden && !window.getSelection().toString()) {
    try {
      const answer = await fetch(location.href, { cache: "no-store", credentials: "same-origin" });
      if (answer.redirected) return location.reload();
      const content = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
      if (!content) throw new Error("no page");
      if (content.innerHTML !== shown) {
        shown = content.innerHTML;
        replace(content);
      }
      say("", false);
    } catch {
      say("control does not answer: figures are old", true);
    }
  }
  setTimeout(refresh, EVERY_MS);
};

pause.hidden = false;
pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  say(paused ? "paused" : "", false);
});
setTimeout(refresh, EVERY_MS);
