// The form of all limits, for both pages. `order(body, done, place)` sends one to the daemon, and says the answer there.
"use strict";

const GROUPS = [
  ["When it works", ["idle", "while-not", "other-cpu", "hours", "battery", "metered"]],
  ["How much of this computer", ["cpu", "gpu", "gpu-memory", "memory", "disk", "temperature", "power", "priority"]],
  ["How much of the line", ["up", "down", "other-hours", "other-up", "other-down", "quota"]],
  ["More", []],
];

// Sends an order to the daemon, and says at `place` what came of it.
async function send(body, done, place) {
  let answer = { error: "The program on this computer does not answer." };
  try {
    const reply = await fetch("/api/order", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
    answer = await reply.json();
  } catch { /* it is gone, or something else answers in its place */ }
  const words = document.getElementById(place);
  words.classList.toggle("wrong", Boolean(answer.error));
  words.textContent = answer.error || done;
  return answer;
}

function make(kind, text) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  return made;
}

function renderLimits(limits, meanings, order) {
  const form = document.getElementById("limits");
  const known = GROUPS.flatMap(([, names]) => names);
  GROUPS.forEach(([title, some], number) => {
    const names = Object.keys(limits).filter((name) => some.includes(name) || (!some.length && !known.includes(name)));
    let group = document.getElementById(`limits-${number}`);
    if (group === null) {
      group = make("details");
      group.id = `limits-${number}`;
      group.append(make("summary"));
      group.firstChild.append(make("strong", title), " ", make("span"));
      names.forEach((name) => group.append(makeLimit(name, meanings[name], order)));
      form.append(group);
    }
    const shown = names.map((name) => `${name} ${limits[name]}`).join(" · ");
    const words = group.querySelector("summary span");
    if (words.textContent !== shown) words.textContent = shown;
  });
  for (const [name, value] of Object.entries(limits)) {
    const input = document.getElementById(`limit-${name}`);
    if (input.dataset.shown !== value && document.activeElement !== input) input.value = value;
    input.dataset.shown = value;
  }
}

function makeLimit(name, meaning, order) {
  const row = make("div"), label = make("label", name), small = make("small", meaning), both = make("span");
  const input = make("input"), set = make("button", "Set"), answer = make("small");
  row.className = "limit";
  label.htmlFor = input.id = `limit-${name}`;
  small.id = `meaning-${name}`;
  answer.id = `answer-${name}`;
  answer.className = "answer";
  answer.setAttribute("role", "status");
  input.setAttribute("aria-describedby", small.id);
  set.type = "button";
  set.setAttribute("aria-label", `Set ${name}`);
  const change = () => order({ verb: "limits", values: { [name]: input.value } }, `${name} is set`, answer.id);
  set.addEventListener("click", change);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); change(); }
  });
  both.append(input, set);
  row.append(label, small, both, answer);
  return row;
}
