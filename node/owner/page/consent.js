// The question. What the run says of itself is shown as text only: it must never become markup.
"use strict";

const at = (id) => document.getElementById(id);
const show = (id, text) => { at(id).textContent = text; };

// A line for each line, so that what does not fit goes on below its words and not below the margin.
function showLines(id, text) {
  at(id).replaceChildren(...text.split("\n").map((line) => {
    const row = make("span", line.trimStart());
    row.style.setProperty("--in", `${line.length - line.trimStart().length}ch`);
    return row;
  }));
}

function render(offer) {
  show("run", offer.run);
  showLines("offer", offer.text);
  renderLimits(offer.limits, offer.meanings, order);
}

async function order(body, done, place = "answer") {
  const answer = await send(body, done, place);
  if (!answer.error) render(answer);
  return !answer.error;
}

async function answer(verb, words) {
  if (!await order({ verb }, words)) return;
  at("yes").disabled = at("no").disabled = true;
  if (verb === "yes") goOn();
}

// The status page comes to the same address, with the same cookie.
async function goOn() {
  try {
    if ((await fetch("/api/status")).ok) { location.replace("/"); return; }
  } catch { /* not there yet */ }
  setTimeout(goOn, 1000);
}

at("yes").addEventListener("click", () => answer("yes", "Thank you. It starts; this page becomes its status."));
at("no").addEventListener("click", () => answer("no", "Nothing was started. You can close this page."));
fetch("/api/offer").then((reply) => reply.json()).then(render);
